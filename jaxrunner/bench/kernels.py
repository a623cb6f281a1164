"""Time of each kernel on the sizes of real models, as a part of what the chip was seen to do."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.bench.device_time import median_us, profiled
from jaxrunner.kernels_pallas.cases.catalog import BENCH, Case

CALLS = 9  # of each kernel, for medians
BYTES = 16e9  # of inputs at a time
THREADS = 12  # that compile
OWN = "mosaic_gpu"  # in names of our kernels: what XLA does around them a step does once, or not
# Places of arguments that a kernel writes, and of its results that are those: a call goes on in
# what the one before has written, so that nothing is copied.
WRITTEN = {
    "rope_write": {3: 1, 4: 2}, "state_step": {0: 1}, "state_chunks": {0: 1}, "conv_step": {0: 0},
}  # fmt: skip


def run(name: str = "") -> dict[str, Any]:
    """Returns and prints microseconds, rate and percent of the ceiling by kernel and case.

    name: what names of kernels begin with; "" for all.

    Raises:
      ValueError: none does.
    """
    cases = [case for case in BENCH if case.kernel.startswith(name)]
    if not cases:
        known = ", ".join(dict.fromkeys(case.kernel for case in BENCH))
        raise ValueError(
            f"--kernels must be what a kernel's name begins with ({known}), got {name}"
        )
    ceilings = {case.unit: case.amount / us / 1e6 for case, us in times(CEILINGS)}
    print({unit: round(rate, 2) for unit, rate in ceilings.items()}, flush=True)
    figures: dict[str, Any] = {"ceilings": ceilings}
    for case, us in times(cases):
        rate = case.amount / us / 1e6
        text = f"{us:9.1f} us {rate:8.2f} {case.unit:8} {rate / ceilings[case.unit]:5.0%}"
        print(f"{case.kernel:18} {case.name:28} {text}", flush=True)
        figures.setdefault(case.kernel, {})[case.name] = dict(us=us, rate=rate)
    return figures


def times(cases: Sequence[Case]) -> Iterator[tuple[Case, float]]:
    """Yields cases with the microseconds of a call."""
    shapes = [jax.eval_shape(lambda case=case: case.make(0)) for case in cases]
    with ThreadPoolExecutor(THREADS) as pool:
        programs = [
            pool.submit(_lowered(case, given).compile)
            for case, given in zip(cases, shapes, strict=True)
        ]
    sizes = [sum(x.size * x.dtype.itemsize for x in given) for given in shapes]
    turns, held = list[_Turns](), 0.0
    for case, program, size in zip(cases, programs, sizes, strict=True):
        if turns and held + size > BYTES:
            yield from _timed(turns)
            turns, held = [], 0.0
        turns, held = [*turns, _Turns(case, program.result())], held + size
    yield from _timed(turns)


def _lowered(case: Case, shapes: tuple[Any, ...]) -> Any:
    written = tuple(WRITTEN.get(case.kernel, ()))
    return jax.jit(case.run, donate_argnums=written).lower(*shapes)


class _Turns:
    """Calls of one kernel."""

    def __init__(self, case: Case, program: Any):
        self.case, self._program, self._args = case, program, list(case.make(0))
        jax.block_until_ready(self())

    def __call__(self) -> Any:
        out = jax.tree.leaves(self._program(*self._args))
        for argument, result in WRITTEN.get(self.case.kernel, {}).items():
            self._args[argument] = out[result]
        return out


def _timed(turns: Sequence[_Turns]) -> Iterator[tuple[Case, float]]:
    found = profiled([turn for turn in turns for _ in range(CALLS)])
    for i, turn in enumerate(turns):
        yield turn.case, median_us(found[i * CALLS : (i + 1) * CALLS], OWN)


def _numbers(*shapes: tuple[int, ...]) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    )


# A sum that reads 2 GiB, and a product of 8192 x 8192 matrices.
CEILINGS = (
    Case(
        "read", "2 GiB", lambda _: _numbers((1 << 30,)), lambda x: x.astype(jnp.float32).sum(),
        2.0 * (1 << 30), "TB/s", {},
    ),
    Case(
        "product", "8192", lambda _: _numbers(*[(8192, 8192)] * 2), lambda x, y: x @ y,
        2.0 * 8192**3, "TFLOP/s", {},
    ),
)  # fmt: skip
