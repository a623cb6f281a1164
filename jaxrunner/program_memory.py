"""What an engine's programs take beside their arguments, in the compiler's own words.

Temporaries hardly depend on the number of KV blocks, which is what is sought: a step of 8192 tokens
of an 8B model takes 740 MiB with one block and with a thousand. So the largest program of each kind
is compiled for a few blocks, before there is a cache, and never run. A formula would have to know
every model and kernel (the same step in plain JAX takes 8.6 GiB). A first start pays with some
seconds; the numbers are kept beside the programs for the next one.
"""

from typing import Any, NamedTuple

from jaxrunner.buckets import step_buckets
from jaxrunner.launch import abstract, program_keys, program_spec
from jaxrunner.layout import Program
from jaxrunner.program_cache import ProgramCache
from jaxrunner.programs import Key, Programs, extra_bytes, output_bytes

SMALL = ("admit", "copy")  # programs that make nothing on their way
NOTE = "memory of the largest programs"


class Need(NamedTuple):
    """What programs take, in bytes."""

    name: str = "none"  # of the largest
    program: int = 0  # its temporaries, and its outputs that are not in place
    waiting: int = 0  # outputs of others that may wait to be read meanwhile


def measure(program: Program, params: Any, cache: ProgramCache | None) -> Need:
    """Returns what any program of an engine can need; `program` should have few blocks.

    cache: where that is remembered.
    """
    match cache and cache.recall(NOTE):
        case [str(name), int(most), int(waiting)]:
            return Need(name, most, waiting)
    shapes, engine = abstract(params), program.engine
    programs = Programs(lambda key: program_spec(program, shapes, key))
    keys = largest(program_keys(program, step_buckets(engine), rich=True))
    programs.warm_up(keys)
    need = add_up({key: programs[key] for key in keys}, engine.async_depth)
    if cache is not None:
        cache.remember(NOTE, need)
    return need


def largest(keys: list[Key]) -> list[Key]:
    """Returns the largest program of each kind, of those that can need much."""
    found: dict[str, Key] = {}
    for key in keys:
        if key.name not in SMALL:
            found[key.name] = max(found.get(key.name, key), key, key=_sizes)
    return list(found.values())


def _sizes(key: Key) -> list[int]:
    """Returns the numbers of a size, from the first on the one that counts most."""
    flat, left = [], [key.size]
    while left:
        value = left.pop(0)
        if isinstance(value, tuple):
            left = [*value, *left]
        elif value is not None:
            flat.append(value)
    return flat


def add_up(executables: dict[Key, Any], async_depth: int) -> Need:
    """Returns what the largest of executables needs while the outputs of launches before it wait.

    Each of `async_depth` launches may be several programs.
    """
    key = max(executables, key=lambda key: extra_bytes(executables[key]))
    outputs = sum(map(output_bytes, executables.values()))
    waiting = async_depth * outputs - output_bytes(executables[key])
    return Need(f"{key.name} {key.size}", extra_bytes(executables[key]), waiting)
