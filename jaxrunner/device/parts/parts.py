"""A program in parts, of which equal ones are compiled once, and whose launches follow each other.

A launch costs about 30 us, little beside a layer of a large model.
"""

from collections.abc import Iterable, Sequence
import functools
import hashlib
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax.extend import core

from jaxrunner.device.build import Build


class Launch(NamedTuple):
    """One launch of a part. Values are numbered as in `Wiring`."""

    program: int  # index of the part's executable
    takes: tuple[int, ...]  # its arguments
    gives: tuple[int, ...]  # its results
    last: tuple[int, ...]  # values that no later launch reads


class Wiring(NamedTuple):
    """How values go from part to part. The first values are the arguments, then the constants."""

    launches: tuple[Launch, ...]  # in their order
    num_values: int
    results: tuple[int, ...]  # values that the program returns


class Part(NamedTuple):
    """The part of a program that one executable is compiled from."""

    jaxpr: Any  # a `ClosedJaxpr`
    donated: tuple[int, ...]  # indices of its donated arguments


class LoweredParts:
    """Lowered parts; stands for a `jax.stages.Lowered`."""

    def __init__(self, parts: Iterable[Part], wiring: Wiring, constants: Sequence[Any], out: Any):
        self._lowered = [_lower(part) for part in parts]
        self._rest = wiring, constants, out

    def compile(self, options: dict[str, str]) -> "Parts":
        """Compiles each part, unless another program has compiled an equal one."""
        builds = [_first(_PartBuild(lowered, options)) for lowered in self._lowered]
        return Parts([build.executable for build in builds], *self._rest)


class Parts:
    """Compiled parts; called as the whole program would be."""

    def __init__(self, programs: list[Any], wiring: Wiring, constants: Sequence[Any], out: Any):
        """constants: values behind the arguments. out: the structure of what a call returns."""
        self._programs, self._wiring, self._out = programs, wiring, out
        self._constants = tuple(constants)

    def __call__(self, *args: Any) -> Any:
        """Launches the parts in their order."""
        values: list[Any] = [*jax.tree.leaves(args), *self._constants]
        values += [None] * (self._wiring.num_values - len(values))
        for program, takes, gives, last in self._wiring.launches:
            given = self._programs[program](*[values[i] for i in takes])
            for i, value in zip(gives, given, strict=True):
                values[i] = value
            for i in last:
                values[i] = None
        return jax.tree.unflatten(self._out, [values[i] for i in self._wiring.results])

    def memory_analysis(self) -> Any:
        """Returns the bytes of the largest part, as XLA's analysis of a whole program has them."""
        names = "temp_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes"
        found = [program.memory_analysis() for program in self._programs]
        if None in found:
            return None
        largest = max(found, key=lambda m: sum(getattr(m, name) for name in names[:2]))
        return SimpleNamespace(**{name: getattr(largest, name) for name in names})

    @property
    def told(self) -> tuple[list[Any], Wiring, Sequence[Any]]:
        """The executables, how they hang together, and the constants."""
        return self._programs, self._wiring, self._constants


class _PartBuild(Build):
    """A lowered part, which equals others that XLA would compile to the same."""

    def __init__(self, lowered: Any, options: dict[str, str]):
        super().__init__(lowered, options)
        text = hashlib.sha256(lowered.as_text().encode()).digest()
        self._key = text, tuple(sorted(options.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PartBuild) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@functools.lru_cache(maxsize=512)
def _first(build: _PartBuild) -> _PartBuild:
    """Returns the first of equal parts, which is compiled for all of them."""
    return build


def _lower(part: Part) -> Any:
    avals = (v.aval for v in part.jaxpr.jaxpr.invars)
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
    function = core.jaxpr_as_fun(part.jaxpr)
    return jax.jit(function, donate_argnums=part.donated, keep_unused=True).lower(*specs)
