"""Named tensors of a user, from numpy, JAX or torch, as arrays of the host. Imports no torch."""

from collections.abc import Iterator, Mapping
import sys
from typing import Any

import ml_dtypes
import numpy as np

from jaxrunner.api.validation import shown

FLOATS = ("float32", "bfloat16", "float16", "float64")
WANTED = "a dict from names in a checkpoint to arrays, or pairs of them"


def read(name: str, tensors: Any) -> dict[str, np.ndarray]:
    """Returns copies of tensors, by their names; name: of the argument they are.

    Torch's may be of any device, require gradients, and be bfloat16.

    Raises:
      TypeError: what is no name or no array of floating-point numbers; names it.
      ValueError: a name that comes twice.
    """
    found: dict[str, np.ndarray] = {}
    try:
        pairs = iter(tensors.items() if isinstance(tensors, Mapping) else tensors)
    except Exception as error:  # of whatever object it is
        raise TypeError(f"{name} must be {WANTED}, got {_told(tensors)}") from error
    for pair in _read(name, pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"{name} must be {WANTED}, got among them {_told(pair)}")
        if pair[0] in found:
            raise ValueError(f"{name} names {pair[0]!r} twice: give each tensor once")
        found[pair[0]] = _array(pair[0], pair[1])
    return found


def _read(name: str, pairs: Iterator[Any]) -> Iterator[Any]:
    """Yields what may fail as it is read."""
    try:
        yield from pairs
    except Exception as error:  # of whatever object it is
        raise TypeError(f"{name} cannot be read to its end: {type(error).__name__}") from error


def _array(name: str, tensor: Any) -> np.ndarray:
    """Returns a copy: its owner may write to the tensor before the copy is used."""
    try:
        array = _of_torch(tensor) if hasattr(tensor, "detach") else np.asarray(tensor)
    except Exception as error:  # of whatever class the tensor is
        raise TypeError(f"{name} cannot be read as an array: {error}") from error
    if array.dtype.name not in FLOATS:
        raise TypeError(
            f"{name} must be an array of {', '.join(FLOATS)}, got {array.dtype} of {_told(tensor)}"
        )
    return np.array(array)


def _of_torch(tensor: Any) -> np.ndarray:
    here = tensor.detach().cpu()
    if str(here.dtype) != "torch.bfloat16":
        return here.numpy()
    # Numpy has no such dtype of its own, so torch gives its bits only. Who made the tensor has
    # imported torch.
    return here.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16)


def _told(value: Any) -> str:
    return f"{shown(value)} of {type(value).__name__}"
