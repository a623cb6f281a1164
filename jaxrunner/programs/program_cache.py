"""Executables on disk, from one process to the next: a second start neither traces nor compiles.

A file holds one executable. Its name is a digest of all that the executable depends on, so that
nothing is ever out of date: whatever differs is another file. Files are code, and JAX unpickles
them: the folder is its owner's alone, like one of Python's own compiled modules.
"""

from collections.abc import Iterable
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
from pathlib import Path
import platform
import tempfile
from typing import Any
import warnings

import jax
import jax.extend
from jaxlib import version, xla_client

from jaxrunner.device.lowering import SETTINGS
from jaxrunner.device.parts import executables

MAGIC, SUFFIX = b"jaxrunner executable 1\n", ".executable"
NOTE = ".json"  # suffix of notes about executables that are not kept
HEAD = len(MAGIC) + 32  # bytes before the executable: also its digest
OWN = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")  # JAX's
MAX_BYTES = 4 << 30  # of the folder: beyond, what was not used for longest is removed


def find_folder(cache_dir: str | None) -> Path | None:
    """Returns where executables are kept, None for nowhere.

    "auto" is the user's cache folder, and nowhere without platformdirs.

    Raises:
      TypeError: `cache_dir` is no name.
    """
    if not isinstance(cache_dir, str | None):
        raise TypeError(f"cache_dir must be a folder, 'auto' or None, got {cache_dir!r}")
    if cache_dir != "auto":
        return None if cache_dir is None else Path(cache_dir)
    try:
        import platformdirs
    except ModuleNotFoundError:
        return None
    return Path(platformdirs.user_cache_dir("jaxrunner")) / "executables"


def is_ours(*functions: Any) -> bool:
    """Whether functions are part of this package, whose code is part of a file's name."""
    return all(function.__module__.startswith("jaxrunner.") for function in functions)


def jax_keeps_its_own() -> bool:
    """Whether JAX keeps what it compiles. What it loads of that cannot be serialised once more."""
    return all(getattr(jax.config, name) for name in OWN)


class ProgramCache:
    """Executables of one context, such as a model and the sizes of an engine."""

    def __init__(
        self, folder: Path, context: Iterable[Any], devices: Iterable[Any] | None = None,
        *, max_bytes: int = MAX_BYTES,
    ):  # fmt: skip
        """context: what all executables depend on, besides the machine, JAX and our own code.
        devices: that they run on, in their order; None for the first of this process.
        """
        self._folder, self._max_bytes = folder, max_bytes
        self._devices = list(jax.local_devices()[:1] if devices is None else devices)
        # An executable holds the numbers of its devices, and runs on no others.
        on = ((device.id, device.device_kind) for device in self._devices)
        self._context = "\n".join(map(str, (*_surroundings(), *on, *context)))
        self._keeps = True

    def load(self, key: Any, args: tuple[Any, ...], out: Any) -> Any:
        """Returns the executable of `key`; None where there is none, or none that is whole.

        args and out: trees of any leaves, structured as what it takes and gives.
        """
        path = self._path(key)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return _note(f"{path} cannot be read", error)
        try:
            body = data[HEAD:]
            if data[:HEAD] != MAGIC + hashlib.sha256(body).digest():
                raise ValueError("its digest is not that of its contents")
            trees = jax.tree.structure((args, {})), jax.tree.structure(out)
            loaded = executables.load(body, *trees, self._devices)
        except Exception as error:  # whatever a foreign file makes a library raise
            return _note(f"{path} is ignored", error)
        with contextlib.suppress(OSError):
            path.touch()
        return loaded

    def save(self, key: Any, executable: Any) -> None:
        """Writes an executable. If that fails, logs a warning and writes no more."""
        if not self._keeps:
            return
        try:
            body = executables.serialize(executable)
            self._write(self._path(key), MAGIC + hashlib.sha256(body).digest() + body)
        except Exception as error:  # a full disk, or an executable that cannot be serialised
            self._keeps = False
            _note(f"compiled programs are not kept in {self._folder}", error)

    def recall(self, key: Any) -> Any:
        """Returns what `remember` was given under `key`; None where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._path(key, NOTE).read_text())
        return None

    def remember(self, key: Any, value: Any) -> None:
        """Keeps a value of JSON's kinds, where that can be."""
        with contextlib.suppress(OSError):
            self._write(self._path(key, NOTE), json.dumps(value).encode())

    def _path(self, key: Any, suffix: str = SUFFIX) -> Path:
        name = hashlib.sha256(f"{self._context}\n{key!r}".encode()).hexdigest()
        return self._folder / f"{name[:40]}{suffix}"

    def _write(self, path: Path, data: bytes) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._make_room(len(data))
        file = tempfile.NamedTemporaryFile(dir=self._folder, delete=False)
        try:
            with file:
                file.write(data)
            Path(file.name).replace(path)  # whole, or not there
        finally:
            Path(file.name).unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):  # another process makes room too
                files.append((path, path.stat()))
        total = size + sum(stat.st_size for _, stat in files)
        for path, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
            if total <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= stat.st_size


def _note(what: str, error: Exception) -> None:
    warnings.warn(f"{what}: {type(error).__name__}: {error}", stacklevel=3)


@functools.cache
def _surroundings() -> tuple[str, ...]:
    """Says what any executable depends on: the machine, JAX, its settings and flags, our code."""
    backend = jax.extend.backend.get_backend()
    options = xla_client.CompileOptions()
    flags = options.executable_build_options.debug_options  # of XLA_FLAGS, once it is asked for
    return (
        jax.__version__, version.__version__, backend.platform_version,
        str(jax.local_device_count()), platform.machine(), _digest([_cpu().encode()]), *_nvidia(),
        str(flags is None), _digest([options.SerializeAsString()]),
        *(str(getattr(jax.config, name)) for name in SETTINGS),
        _digest(path.read_bytes() for path in _code()),
    )  # fmt: skip


def _nvidia() -> list[str]:
    """Names NVIDIA's driver and libraries, among whose kernels XLA chooses."""
    driver = Path("/proc/driver/nvidia/version")
    names = [f"{found.name} {found.version}" for found in importlib.metadata.distributions()]
    libraries = sorted({name for name in names if name.startswith("nvidia-")})
    return [driver.read_text() if driver.exists() else "", *libraries]


def _code() -> list[Path]:
    """Returns the sources of the whole package, whichever module this is; folders may be links."""
    package = str(importlib.resources.files("jaxrunner"))
    found = os.walk(package, followlinks=True)
    return sorted(Path(at, name) for at, _, names in found for name in names if name[-3:] == ".py")


def _cpu() -> str:
    """Describes the processor, for which code of a CPU is made."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    lines = info.read_text().splitlines()
    return "\n".join(
        sorted({x for x in lines if x.startswith(("flags", "Features", "model name"))})
    )


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
