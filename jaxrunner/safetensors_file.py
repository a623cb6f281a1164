"""Safetensors files: checked headers, mapped tensors, and writing. Knows no JAX.

Of the format: 8 bytes of header length, little-endian; a JSON header of dtype, shape and byte range
of each tensor; then the bytes.
"""

from collections.abc import Iterable, Mapping
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "BOOL": np.dtype(np.bool),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "U64": np.dtype(np.uint64),
}
# What torch.save writes: a zip archive today, a bare pickle of old.
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Tensor(NamedTuple):
    """Where one tensor lies in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file


def read_header(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a file, all within it, by name.

    Raises:
      FileNotFoundError, ValueError: the file is missing, or lies about what it holds.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: download the checkpoint again")
    with path.open("rb") as file:
        first = file.read(9)
        if first.startswith(PICKLES) and first[8:] != b"{":
            raise ValueError(
                f"{path} is a pickle or zip file named .safetensors, and unpickling can run any "
                "code: get the model as real safetensors"
            )
        # Their reader refuses what is no safetensors; ours then needs no care about types.
        try:
            with safe_open(path, "np"):
                size = int.from_bytes(first[:8], "little")
                file.seek(8)
                entries = json.loads(file.read(size), object_pairs_hook=_unique)
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path} must be a whole safetensors file, got {path.stat().st_size} bytes of "
                f"which its header says: {error}. Download it again"
            ) from error
    entries.pop("__metadata__", None)
    data = 8 + size, path.stat().st_size
    return {name: _read_entry(f"{path}: {name}", e, *data) for name, e in entries.items()}


def view(mapped: np.memmap, tensor: Tensor) -> np.ndarray:
    """Returns a tensor of a file mapped as bytes, without reading it."""
    return np.ndarray(tensor.shape, tensor.dtype, mapped, tensor.start)


def write(path: Path, tensors: Mapping[str, tuple[Any, tuple[int, ...]]], arrays: Iterable) -> None:
    """Writes `tensors`, names to dtype and shape, from `arrays` in that order, one at a time.

    The file appears under its name only once it is whole.

    Raises:
      ValueError: a dtype that the format does not have.
    """
    names, header, end = {dtype: name for name, dtype in DTYPES.items()}, {}, 0
    for name, (dtype, shape) in tensors.items():
        if np.dtype(dtype) not in names:
            raise ValueError(f"{name}: dtype must be one of {sorted(DTYPES)}, got {dtype}")
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        offsets = [start, end]
        header[name] = dict(dtype=names[np.dtype(dtype)], shape=shape, data_offsets=offsets)
    # Older transformers refuse a file that does not name its framework.
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (dtype, shape), array in zip(tensors.values(), arrays, strict=True):
            assert (array.dtype, array.shape) == (np.dtype(dtype), tuple(shape))
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    os.replace(part, path)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON pairs, whose last value of a key would win unseen."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
        raise ValueError(f"key {twice!r} appears twice")
    return values


def _read_entry(where: str, entry: dict[str, Any], first: int, last: int) -> Tensor:
    """Reads one tensor's entry; the data are the bytes from `first` to `last` of the file."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{where}: dtype must be one of {sorted(DTYPES)}, got {entry['dtype']}")
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    start, end = (first + offset for offset in entry["data_offsets"])
    if not first <= start <= end <= last:
        raise ValueError(
            f"{where} must lie in bytes {first} to {last} of its file, got {start} to {end}: "
            "download it again"
        )
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"{where} must be {math.prod(shape) * dtype.itemsize} bytes for "
            f"{dtype}{list(shape)}, got {end - start}: download it again"
        )
    return Tensor(dtype, shape, start)
