"""Time of kernels on a GPU, by JAX's profiler, where its L2 cache has nothing that they read."""

from collections.abc import Callable, Iterable, Sequence
import gzip
import json
from pathlib import Path
import statistics
import tempfile
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

Kernels: TypeAlias = dict[str, list[float]]  # microseconds of each launch, by the kernel's name
ROWS, NUMBERS = 1 << 12, 1 << 14  # float32 numbers that are read, several times what a cache holds


def profiled(calls: Sequence[Callable[[], Any]]) -> list[Kernels]:
    """Makes calls one after the other, and returns the kernels that each has launched.

    Each call is to launch some, and to have been made before: what compiles is not left out. Before
    each come a kernel of a name of its own, the mark, and a sum whose numbers fill the cache. Were
    they written, a call would have to wait until the cache has stored them.

    Raises:
      RuntimeError: the profile has no kernels, or not those of each call.
    """
    numbers = jnp.ones((ROWS, NUMBERS), jnp.float32)
    mark, fill = jax.jit(lambda x: jnp.arctan2(x, x)), jax.jit(lambda x: x.sum(1))

    row = numbers[0]
    jax.block_until_ready((mark(row), fill(numbers)))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for call in (lambda: None, *calls):
                mark(row)
                jax.block_until_ready(fill(numbers))
                jax.block_until_ready(call())
        (path,) = Path(folder).glob("plugins/profile/*/*.trace.json.gz")
        found = by_call(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    if len(found) != len(calls):
        raise RuntimeError(
            f"a profile wants kernels of each of {len(calls)} calls, got those of {len(found)}: "
            f"it takes a GPU ({jax.devices()[0].platform} here), and no call may use atan2 alone"
        )
    return found


def by_call(events: Iterable[dict[str, Any]]) -> list[Kernels]:
    """Returns the kernels of each call in a trace's events, between marks; the first is a mark.

    Behind the first mark is what each call has before its own, and nothing else.

    Raises:
      RuntimeError: a call has not.
    """
    events = list(events)
    streams = {
        (event["pid"], event["tid"]) for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("Stream")
    }  # fmt: skip
    launches = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]
    launches.sort(key=lambda event: event["ts"])
    groups: list[list[dict[str, Any]]] = []
    for event in launches:
        if event["name"] == launches[0]["name"]:
            groups.append([])
        else:
            groups[-1].append(event)
    before = [event["name"] for event in groups[0]] if groups else []
    found: list[Kernels] = []
    for own in groups[1:]:
        if (names := [event["name"] for event in own])[: len(before)] != before:
            raise RuntimeError(f"a profile wants {before} before each call, got {names}: try again")
        kernels: Kernels = {}
        for event in own[len(before) :]:
            kernels.setdefault(event["name"], []).append(event["dur"])
        found.append(kernels)
    return found


def median_us(calls: Iterable[Kernels], name: str = "") -> float:
    """Returns the median of the microseconds that the kernels of a call take, without gaps.

    name: what the names of those that count have in them; all of a call where none has it.
    """

    def of_call(kernels: Kernels) -> float:
        named = [us for kernel, us in kernels.items() if name in kernel]
        return sum(map(sum, named or kernels.values()))

    return statistics.median(map(of_call, calls))
