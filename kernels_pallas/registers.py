"""Whether each warpgroup of a kernel gets the registers that it asks for.

JAX 0.12 compiles by libnvJitLink where it finds it, which gives all threads as many.
"""

import ctypes
import importlib.util
from pathlib import Path

import jax

NAMES = ("libnvJitLink.so.12", "libnvJitLink.so.13")


def finds_nvjitlink() -> bool:
    """Whether XLA finds libnvJitLink: among Python's packages, or where the system looks."""
    package = importlib.util.find_spec("nvidia")
    folders = (package and package.submodule_search_locations) or ()
    files = (file for at in folders for name in NAMES for file in Path(at).glob(f"*/lib/{name}"))
    return any(files) or any(map(_loads, NAMES))


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


OWN_REGISTERS = jax.__version_info__ < (0, 12) or not finds_nvjitlink()
