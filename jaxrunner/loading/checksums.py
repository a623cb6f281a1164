"""Checksums beside saved files: files that have changed since are refused. Knows no JAX.

They detect accidents, such as a copy that broke off; who changes a file on purpose can change them.
"""

from concurrent.futures import ThreadPoolExecutor
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from jaxrunner.api.limits import JSON_BYTES, check_bytes

NAME = "jaxrunner-checksums.json"
AGAIN = "copy or save the folder again"


def of_array(name: str, array: Any) -> str:
    """Returns the SHA-256 of an array of numpy, its name, dtype and shape included."""
    total = hashlib.sha256(f"{name} {array.dtype} {list(array.shape)}\n".encode())
    total.update(memoryview(array.reshape(-1).view("uint8")))
    return total.hexdigest()


def write(folder: Path) -> None:
    """Writes the checksum of each file in a folder into a file of it."""
    found = dict(sorted(_of_files(folder).items()))
    (folder / NAME).write_text(json.dumps(found, indent=1), encoding="utf-8")


def check(folder: Path, *, required: bool) -> None:
    """Checks that a folder's files are those that `write` saw; hidden ones do not count.

    required: whether a folder without checksums is refused.

    Raises:
      ValueError: a file has changed, is missing, or was added; names it.
    """
    if not (folder / NAME).is_file():
        if required:
            raise ValueError(f"{folder} has no {NAME}, so nothing in it can be trusted: {AGAIN}")
        return
    wanted, found = _read(folder / NAME), _of_files(folder)
    for name in sorted(wanted | found):
        if name not in found:
            raise ValueError(f"{folder / name} is missing: {AGAIN}")
        if name not in wanted:
            raise ValueError(f"{folder / name} was not saved with the others: remove it")
        if wanted[name] != found[name]:
            raise ValueError(f"{folder / name} has changed since it was saved: {AGAIN}")


def _read(path: Path) -> dict[str, Any]:
    check_bytes(path, JSON_BYTES)
    try:
        wanted = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has changed, it is not JSON ({error}): {AGAIN}") from error
    if not isinstance(wanted, dict):
        raise ValueError(f"{path} has changed, it holds no object: {AGAIN}")
    return wanted


def _of_files(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each regular file, by its path in the folder."""
    paths = [Path(at, name) for at, _, names in os.walk(folder) for name in names]
    paths = [p for p in paths if p != folder / NAME and p.name[0] != "." and p.is_file()]
    names = [p.relative_to(folder).as_posix() for p in paths]
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_sum, paths), strict=True))


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
