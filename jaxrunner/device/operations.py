"""Lists which implementation of each operation a program runs, by tracing it."""

from dataclasses import replace
import functools
from typing import Any

import jax

from jaxrunner.device.program_key import Key
from jaxrunner.device.program_spec import program_spec
from jaxrunner.operation import Chosen
from jaxrunner.program.program import Program


def operations(program: Program, params: Any, key: Key) -> list[Chosen]:
    """Returns the choices of a program with layers, each once, in their order.

    Traces the program, and compiles nothing. `params` may be abstract.
    """
    found: list[Chosen] = []
    noted = replace(program, ops=functools.partial(program.ops, note=found.append))
    spec = program_spec(noted, params, key)
    jax.eval_shape(functools.partial(spec.function, **dict(spec.static)), *spec.args)
    return [chosen for i, chosen in enumerate(found) if chosen not in found[:i]]
