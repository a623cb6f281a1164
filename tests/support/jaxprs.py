"""What a traced program does."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a program, those of its functions and branches too."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves([*eqn.params.values()], is_leaf=_is_program):
            if _is_program(inner):
                yield from equations(getattr(inner, "jaxpr", inner))


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")
