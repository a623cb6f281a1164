"""What a traced program does."""

from collections.abc import Iterator
import functools
from typing import Any

import jax


def traced(spec: Any) -> Any:
    """Returns the program of a spec as a jaxpr."""
    return jax.make_jaxpr(functools.partial(spec.function, **dict(spec.static)))(*spec.args).jaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program, those of its functions and branches too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_program):
            if _is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
