"""Folders whose files are changed as a full disk, a bad copy or an attacker would, and put back."""

from collections.abc import Callable
import json
from pathlib import Path
import random
import shutil
from typing import Any

from tests.attack import values

NUMBERS = (0, -1, 1, 2, 2**31, 2**63, -(2**40), 10**6, 10**9, 10**30, 1e308, 0.5, -0.0)
WORDS = ("", "a", "\0", "\ud800", "../x", "/etc/passwd", "NaN", "x" * 10_000, "é", "tuple", "bytes")
OTHER_TEXTS = (
    b"", b"null", b"3", b'""', b"[]", b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"{'a': 1}",
    b'{"a": 1' + b"0" * 9999 + b"}",
)  # fmt: skip


class Folder:
    """A folder that was good."""

    def __init__(self, path: Path):
        self.path = path
        self.files = {p: p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
        self._changed: set[Path] = set()

    def write(self, path: Path, data: bytes) -> None:
        """Changes a file."""
        self._changed.add(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        self._changed.add(path)
        path.unlink(missing_ok=True)

    def mend(self) -> None:
        """Puts back what was changed."""
        for path in self._changed:
            if path.is_dir():
                shutil.rmtree(path)
            if path in self.files:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.files[path])
            else:
                path.unlink(missing_ok=True)
        self._changed = set()

    def tamper(self, rng: random.Random, among: Callable[[Path], bool] = lambda _: True) -> str:
        """Changes one of its files. Returns in words how."""
        path = rng.choice([path for path in self.files if among(path)])
        data, how = self.files[path], rng.randrange(8)
        name, at = path.relative_to(self.path), rng.randrange(max(1, len(data)))
        if how == 0:
            self.remove(path)
            return f"{name} removed"
        if how == 1:
            self.write(path, data[:at])
            return f"{name} cut at {at}"
        if how == 2:
            self.write(path, data + rng.randbytes(rng.choice((1, 9, 999))))
            return f"{name} longer"
        if how == 3:
            other = rng.choice([*self.files])
            self.write(path, self.files[other])
            return f"{name} replaced by {other.relative_to(self.path)}"
        if how == 4:
            length = rng.choice((1, 8, 64))
            new = rng.randbytes(min(length, len(data) - at))
            self.write(path, data[:at] + new + data[at + len(new) :])
            return f"{name} has {len(new)} other bytes at {at}"
        if how == 5:
            self.write(path, bytes(len(data)))
            return f"{name} zeroed"
        flipped = bytearray(data)
        if flipped:
            flipped[at] ^= 1 << rng.randrange(8)
        self.write(path, bytes(flipped))
        return f"{name} has a bit of byte {at} flipped"


def json_value(rng: random.Random, depth: int = 0) -> Any:
    """Returns a value that JSON has."""
    kind = rng.randrange(9) if depth < 3 else rng.randrange(6)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(WORDS)
    if kind == 3:
        return rng.choice((None, True, False, values.NAN, values.INF, -values.INF))
    if kind == 4:
        return rng.choice(([], {}, [[]], {"a": 1}, {"tuple": 1}, {"Request": 99}, {"Request": -1}))
    if kind == 5:
        return rng.randrange(-99, 99)
    parts = [json_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return parts if kind < 8 else {f"{rng.choice(WORDS)}{i}": p for i, p in enumerate(parts)}


def changed(rng: random.Random, value: Any, path: str = "") -> tuple[Any, str]:
    """Returns a JSON value of which one part is another, and where."""
    inside = isinstance(value, dict | list) and len(value) and rng.random() < 0.9
    if not inside:
        new = json_value(rng)
        return new, f"{path} is {new!r:.80}"
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, how = rng.choice(keys), rng.randrange(12)
    value = value.copy()
    if how == 0:
        del value[key]
        return value, f"{path}/{key} is gone"
    if how == 1 and isinstance(value, dict):
        value[rng.choice(WORDS)] = json_value(rng)
        return value, f"{path} has more"
    if how == 1:
        value.insert(key, value[key])
        return value, f"{path}/{key} twice"
    value[key], words = changed(rng, value[key], f"{path}/{key}")
    return value, words


def json_text(rng: random.Random, data: bytes) -> tuple[bytes, str]:
    """Returns the text of a JSON file of which a part is another, and in words how."""
    how = rng.randrange(24)
    if how == 0:
        return b"[" * 10**5, "a hundred thousand brackets"
    if how == 1:
        return b'{"a":' * 10**5, "a hundred thousand objects"
    if how == 2:
        return rng.choice(OTHER_TEXTS), "another text"
    new, words = changed(rng, json.loads(data))
    return json.dumps(new).encode("utf-8", "surrogatepass"), words
