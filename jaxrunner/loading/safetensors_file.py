"""Safetensors files: checked headers, mapped tensors, and writing. Knows no JAX.

Of the format: 8 bytes of header length, little-endian; a JSON header of dtype, shape and byte range
of each tensor; then the bytes.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxrunner.api.limits import HEADER_BYTES, MEBI
from jaxrunner.api.validation import shown
from jaxrunner.loading import checksums

DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
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
CHECKSUM = "sha256:"  # before a tensor's name: a key of the header's metadata
# The first bytes of torch.save's files: a zip archive today, a bare pickle of old.
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Tensor(NamedTuple):
    """Where one tensor lies in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte of the file
    checksum: str | None = None  # `checksums.of_array` of it, where we wrote the file


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
        size = int.from_bytes(first[:8], "little")
        if HEADER_BYTES < size <= path.stat().st_size:
            raise ValueError(
                f"{path} has a header of {size} bytes, at most {HEADER_BYTES // MEBI} MiB can be "
                "read: it is none of a model"
            )
        # Their reader refuses what is no safetensors; ours then needs no care about types.
        try:
            with safe_open(path, "np"):
                file.seek(8)
                entries = json.loads(file.read(size), object_pairs_hook=_unique)
        except (SafetensorError, ValueError) as error:
            raise ValueError(
                f"{path} must be a whole safetensors file, got {path.stat().st_size} bytes of "
                f"which its header says: {error!s:.300}. Download it again"
            ) from error
    metadata = entries.pop("__metadata__", None) or {}
    data = 8 + size, path.stat().st_size
    tensors = {name: _read_entry(f"{path}: {name}", e, *data) for name, e in entries.items()}
    sums = {k.removeprefix(CHECKSUM): v for k, v in metadata.items() if k.startswith(CHECKSUM)}
    if not sums:
        return tensors
    if sums.keys() != tensors.keys():
        name = min(sums.keys() ^ tensors.keys())
        raise ValueError(f"{path}: tensors and checksums differ in {name!r}: save it again")
    return {name: tensor._replace(checksum=sums.get(name)) for name, tensor in tensors.items()}


def read(path: Path, name: str, tensor: Tensor) -> np.ndarray:
    """Returns a tensor's values; a file that changes later does not change them.

    Raises:
      ValueError: the file has become shorter, or its checksum says that the values have changed.
    """
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    # Not mapped: to look at what is no longer in a file would end the process.
    data = np.fromfile(path, np.uint8, size, offset=tensor.start)
    if data.size < size:
        raise ValueError(
            f"{path}: {name} ends after {data.size} of {size} bytes, the file has become shorter "
            "since its header was read: load it when nobody writes to it"
        )
    array = data.view(tensor.dtype).reshape(tensor.shape)
    if tensor.checksum not in (None, checksums.of_array(name, array)):
        raise ValueError(f"{path}: {name} has changed since it was saved: copy the file again")
    return array


def write(path: Path, tensors: Mapping[str, tuple[Any, tuple[int, ...]]], arrays: Iterable) -> None:
    """Writes `tensors`, names to dtype and shape, from `arrays` in that order, one at a time.

    Their checksums are in the metadata. The file appears under its name only once it is whole.

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
    part, sums = path.with_name(path.name + ".part"), dict.fromkeys(tensors, "0" * 64)
    with part.open("wb") as file:
        file.write(_header(header, sums))
        for (name, (dtype, shape)), array in zip(tensors.items(), arrays, strict=True):
            assert (array.dtype, array.shape) == (np.dtype(dtype), tuple(shape))
            array = np.ascontiguousarray(array).reshape(shape)
            file.write(array.reshape(-1).view(np.uint8).data)
            sums[name] = checksums.of_array(name, array)
        file.seek(0)
        file.write(_header(header, sums))  # as long as before
    os.replace(part, path)


def _header(entries: dict[str, Any], sums: dict[str, str]) -> bytes:
    # Older transformers refuse a file that does not name its framework.
    metadata = {"format": "pt"} | {CHECKSUM + name: total for name, total in sums.items()}
    text = json.dumps({"__metadata__": metadata} | entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes an object of JSON pairs, whose last value of a key would win unseen."""
    values = dict(pairs)
    if len(values) != len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {shown(twice)} appears twice")
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
