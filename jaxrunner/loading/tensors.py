"""Named tensors of a user, from numpy, JAX or torch, as arrays of the host. Imports no torch."""

from collections.abc import Iterator, Mapping
import sys
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxrunner.api.validation import shown

FLOATS = ("float32", "bfloat16", "float16", "float64")
NO_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType({})
# Dtypes that numpy has none of: torch's own of as many bits, and ours.
BITS = {
    "torch.bfloat16": ("int16", ml_dtypes.bfloat16),
    "torch.float8_e4m3fn": ("uint8", ml_dtypes.float8_e4m3fn),
    "torch.float8_e8m0fnu": ("uint8", ml_dtypes.float8_e8m0fnu),
}
WANTED = "a dict from names in a checkpoint to arrays, or pairs of them"


def read(
    name: str, tensors: Any, kinds: Mapping[str, tuple[str, ...]] = NO_KINDS
) -> dict[str, np.ndarray]:
    """Returns copies of tensors, by their names; name: of the argument they are.

    Torch's may be of any device, require gradients, and be bfloat16 or fp8. kinds: dtypes of those
    tensors that are to be no usual floating-point numbers.

    Raises:
      TypeError: what is no name or no array in such a dtype; names it.
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
        found[pair[0]] = _array(pair[0], pair[1], kinds.get(pair[0], FLOATS))
    return found


def _read(name: str, pairs: Iterator[Any]) -> Iterator[Any]:
    """Yields what may fail as it is read."""
    try:
        yield from pairs
    except Exception as error:  # of whatever object it is
        raise TypeError(f"{name} cannot be read to its end: {type(error).__name__}") from error


def _array(name: str, tensor: Any, kinds: tuple[str, ...]) -> np.ndarray:
    """Returns a copy: its owner may write to the tensor before the copy is used."""
    try:
        array = _of_torch(tensor) if hasattr(tensor, "detach") else np.asarray(tensor)
    except Exception as error:  # of whatever class the tensor is
        raise TypeError(f"{name} cannot be read as an array: {error}") from error
    if array.dtype.name not in kinds:
        raise TypeError(
            f"{name} must be an array of {', '.join(kinds)}, got {array.dtype} of {_told(tensor)}"
        )
    return np.array(array)


def _of_torch(tensor: Any) -> np.ndarray:
    here = tensor.detach().cpu()
    # Numpy has no such dtypes of its own, so torch gives their bits only. Who made the tensor has
    # imported torch.
    if (kind := str(here.dtype)) in BITS:
        bits, own = BITS[kind]
        return here.view(getattr(sys.modules["torch"], bits)).numpy().view(own)
    return here.numpy()


def _told(value: Any) -> str:
    return f"{shown(value)} of {type(value).__name__}"
