"""One weight and the tensors of a checkpoint that it is made of. Its class declares what it is."""

from typing import Any

import numpy as np

from jaxrunner.config import DTYPES
from jaxrunner.model import Source


def join(where: str, source: Source, parts: dict[str, np.ndarray], leaf: Any) -> np.ndarray:
    """Makes a weight of its tensors, of which it may share the memory.

    A dtype that models compute in is given to the tensors first, so that each is rounded once; a
    weight of another one, of 8 bits for example, is made of the tensors as they are stored.
    where: its name in messages. parts: by their names in messages. leaf: has its shape and dtype.

    Raises:
      ValueError: values that the dtype does not hold, or `source` makes another shape or dtype.
    """
    dtype = np.dtype(leaf.dtype)
    packed = any(not set(DTYPES).intersection(kinds) for kinds in source.dtypes)
    as_stored = packed or dtype.name not in DTYPES
    arrays = list(parts.values()) if as_stored else _rounded(parts, dtype)
    made = source.join(arrays)
    if packed and dtype.name in DTYPES:
        (made,) = _rounded({where: made}, dtype)
    if (made.shape, made.dtype) != (tuple(leaf.shape), dtype):
        raise ValueError(
            f"{where} is declared {dtype}{list(leaf.shape)}, its Source makes "
            f"{made.dtype}{list(made.shape)} of {list(source.names)}: correct one of them"
        )
    return made


def split(where: str, source: Source, value: np.ndarray) -> list[np.ndarray]:
    """Returns the tensors that a weight was made of.

    Raises:
      ValueError: it does not hold them.
    """
    if source.split is None:
        raise ValueError(
            f"{where} does not hold the tensors that it was made of, {list(source.names)}: "
            "only all of them together can make it anew"
        )
    return source.split(value)


def _rounded(parts: dict[str, np.ndarray], dtype: np.dtype) -> list[np.ndarray]:
    with np.errstate(over="ignore"):  # found below, by name
        cast = [part.astype(dtype, copy=False) for part in parts.values()]
    if dtype == np.float16:
        for (where, part), half in zip(parts.items(), cast, strict=True):
            if part.dtype != dtype and np.any(np.isinf(half) & np.isfinite(part)):
                raise ValueError(
                    f"{where} holds values over 65504, the largest of dtype='float16': "
                    "use dtype='bfloat16' or 'float32'"
                )
    return cast
