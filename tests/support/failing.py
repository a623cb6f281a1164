"""Programs, devices and tokenizers that fail, for tests: real to everything above them."""

from collections.abc import Callable
import itertools
import threading
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner.programs.program_table import Key, ProgramTable

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."
HOWS = ("no compilation", "before the launch", "after the donation", "at the download")


class Unreadable:
    """Stands for what a step that failed on the device gave."""

    def copy_to_host_async(self) -> None:
        pass

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)


class Hanging:
    """Stands for what a device that hangs is to give."""

    def __init__(self, end: threading.Event) -> None:
        self._end = end

    def is_ready(self) -> bool:
        return self._end.is_set()

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self._end.wait()
        return np.zeros(1)


def programs(
    monkeypatch: pytest.MonkeyPatch, when: Callable[[Key], bool], how: Callable[[], str]
) -> list[str]:
    """Makes programs fail: those that `when(key)` says, as `how()` says, one of `HOWS`.

    Returns a list that gains the names of those that did.
    """
    real, failed = ProgramTable.__getitem__, list[str]()

    def get(self: ProgramTable, key: Key) -> Any:
        if not when(key):
            return real(self, key)
        failed.append(key.name)
        if (chosen := how()) == "no compilation":
            raise jax.errors.JaxRuntimeError("INTERNAL: ptxas died\nof a signal")
        program = real(self, key)

        def launch(*args: Any) -> Any:
            if chosen == "before the launch":
                raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
            out = program(*args)
            if chosen == "at the download" and isinstance(out, tuple) and len(out) == 2:
                return out[0], Unreadable()
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

        return launch

    monkeypatch.setattr(ProgramTable, "__getitem__", get)
    return failed


def nth(n: int, *names: str) -> Callable[[Key], bool]:
    """Returns what is true of the n-th use of programs with one of these names."""
    count = itertools.count()
    return lambda key: key.name in names and next(count) == n


class Tokenizer:
    """A tokenizer of the library's that fails at a character."""

    def __init__(self, inner: Any, character: str):
        self._inner, self._character = inner, character

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **kwargs: Any) -> Any:
        if self._character in text:
            raise Exception("no such character")  # as the library does
        return self._inner.encode(text, **kwargs)

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        if ord(self._character) - ord("A") in ids:
            raise Exception("no such token")
        return self._inner.decode(ids, **kwargs)
