"""Executables that a process holds, which are many where a test is run of every family."""

import ctypes
import gc
import os
from pathlib import Path

import jax

from jaxrunner.device import lowering
from jaxrunner.device.parts import parts


def forget() -> None:
    """Frees all executables, and what the compiler held for them."""
    lowering._lower.cache_clear()
    parts._first.cache_clear()
    jax.clear_caches()
    gc.collect()
    # What is free would count as held, and each module to come would forget all once more.
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def are_many() -> bool:
    """Returns whether this process maps much memory, of 65,530 parts at most, or holds 3 GiB."""
    process = Path("/proc/self")
    if not process.exists():
        return True
    resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident > 3 << 30 or (process / "maps").read_bytes().count(b"\n") > 40_000
