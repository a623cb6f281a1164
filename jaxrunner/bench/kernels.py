"""Time of each kernel on the sizes of real models, as a part of what the chip was seen to do."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.cases import BENCH, Case

LINKS, SETS, BYTES = 16, 4, 200e6  # calls in a chain; sets of inputs, fewer where they are large


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
    ceilings = {"TB/s": read_rate(), "TFLOP/s": product_rate()}
    print({unit: round(rate, 2) for unit, rate in ceilings.items()}, flush=True)
    figures: dict[str, Any] = {"ceilings": ceilings}
    for case in cases:
        seconds = time_of(case)
        rate = case.amount / seconds / 1e12
        share = rate / ceilings[case.unit]
        text = f"{seconds * 1e6:9.1f} us {rate:8.2f} {case.unit:8} {share:5.0%}"
        print(f"{case.kernel:18} {case.name:28} {text}", flush=True)
        figures.setdefault(case.kernel, {})[case.name] = dict(us=seconds * 1e6, rate=rate)
    return figures


def time_of(case: Case) -> float:
    """Returns the seconds of one call among many in one program, inputs taken in turns."""
    size = sum(x.nbytes for x in case.make(0))
    inputs = [case.make(seed) for seed in range(max(1, min(SETS, int(BYTES / size) + 1)))]
    kernel = jax.jit(case.run)

    def chain(inputs: list[tuple[Any, ...]]):
        inputs, after = list(inputs), jnp.zeros((), inputs[0][0].dtype)
        waited = []
        for i in range(LINKS):
            first, *rest = inputs[i % len(inputs)]
            # Each call waits for the one before, through one number, which is a result: XLA drops
            # from a barrier what nobody reads, and then all calls but the last.
            first, after = jax.lax.optimization_barrier((first, after))
            waited.append(after)
            out = jax.tree.leaves(kernel(first, *rest))
            after = out[0].ravel()[0]
            if case.kernel == "rope_write":  # goes on in the caches that it has written
                inputs[i % len(inputs)] = first, *rest[:2], *out[1:], *rest[4:]
            if case.kernel in ("state_step", "state_chunks"):  # and in the states
                inputs[i % len(inputs)] = out[1], *rest
        return waited, after

    return median_of(jax.jit(chain), inputs) / LINKS


def read_rate() -> float:
    """Returns the TB/s at which a sum reads 2 GB."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.bfloat16)
    return x.nbytes / median_of(jax.jit(lambda x: x.astype(jnp.float32).sum()), x) / 1e12


def product_rate() -> float:
    """Returns the TFLOP/s of a bfloat16 product of 8192 x 8192 matrices."""
    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    return 2 * 8192**3 / median_of(jax.jit(lambda x: x @ x), x) / 1e12


def median_of(function: Any, *args: Any) -> float:
    """Returns the median seconds of a compiled function's calls, several in flight."""
    jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready([function(*args) for _ in range(4)])
        seconds.append((time.perf_counter() - start) / 4)
    return statistics.median(seconds)
