"""Time of a sum over devices, a residual addition and a norm: psum and `add_rms_norm`, and the one
kernel of `reduce_add_norm`.

python benchmarks/reduce_add_norm.py --out FILE    on all GPUs of a host, JAX 0.12 or newer

A chain of calls, each on what the one before gave, in one CUDA graph; the time of a call is that of
128 more of them. With one part `psum` has a kernel that a step has not. The kernel waits for other
devices, so the process ends itself where it hangs.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
import json
import os
from pathlib import Path
import threading
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.bench.workloads import machine
from jaxrunner.device import xla_options
from jaxrunner.kernels_pallas.products import peer_rows
from jaxrunner.kernels_pallas.products.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.products.peer_rows import Peers
from jaxrunner.kernels_pallas.products.reduce_add_norm import reduce_add_norm, refuses
from jaxrunner.parallel.mesh import TENSOR

SHORT, LONG = 64, 192  # calls of a chain
REPEATS, LIMIT_S = 12, 20  # of a case's calls
OPTIONS = dict(xla_options.TIMED + xla_options.GRAPH)
OWN, WHOLE = PartitionSpec(TENSOR), PartitionSpec()
Step = Callable[..., tuple[jax.Array, jax.Array]]


def by_psum(x: Any, parts: Any, weight: Any, places: Any) -> tuple[jax.Array, jax.Array]:
    """As steps do: XLA sums the parts with those of other devices."""
    # What is summed depends on x: XLA would sum equal arrays once.
    own = (parts.sum(0) + 0 * x).astype(x.dtype)
    return add_rms_norm(x, lax.psum(own, TENSOR), weight, eps=1e-5)


def by_kernel(x: Any, parts: Any, weight: Any, places: Any) -> tuple[jax.Array, jax.Array]:
    """In one kernel."""
    return reduce_add_norm(x, parts, weight, Peers(places, *x.shape), eps=1e-5)


def chain(step: Step, calls: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns a device's function of so many calls."""
    one = jax.jit(step)  # lowered once

    def run(x: Any, parts: Any, weight: Any, places: Any) -> tuple[jax.Array, jax.Array]:
        # A sum that XLA knows: devices meet, and have loaded all kernels, before one waits in any.
        x = x * lax.psum(jnp.ones((1, 1), x.dtype), TENSOR)
        normed = x
        for _ in range(calls):
            own, _ = lax.optimization_barrier((parts[0], x))  # else all sums were one
            x, normed = one(x, own, weight, places[0])
        return x[None], normed[None]

    return run


def compiled(mesh: Mesh, step: Step, calls: int, args: tuple[jax.Array, ...]) -> Any:
    """Returns a compiled chain."""
    mapped = jax.shard_map(
        chain(step, calls), mesh=mesh, in_specs=(WHOLE, OWN, WHOLE, OWN), out_specs=OWN,
        check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped).lower(*args).compile(OPTIONS)


def best_us(program: Any, args: tuple[jax.Array, ...]) -> float:
    """Returns the least microseconds of a call."""
    took = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        took.append(time.perf_counter() - start)
    return min(took[2:]) * 1e6


def main() -> None:
    """Measures both, and says how far the kernel's results are from psum's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 128, 256])
    parser.add_argument("--parts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--len", type=int, default=4096, help="of a row")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()), (TENSOR,))
    exchange = peer_rows.make(mesh, TENSOR, max(args.tokens), args.len)
    rng, sizes = np.random.default_rng(0), [(P, T) for P in args.parts for T in args.tokens]
    result: dict[str, Any] = dict(machine(), devices=mesh.size, us_of_a_call={})
    for P, T in sizes:
        given = inputs(mesh, rng, P, T, args.len, exchange.places)
        if why := refuses(given[0], given[1][0], given[2], Peers(given[3][0], T, args.len)):
            print(f"{P} parts of {T} tokens: {why}")
            continue
        with ThreadPoolExecutor(4) as pool:
            jobs = [
                pool.submit(compiled, mesh, step, calls, given)
                for step in (by_psum, by_kernel) for calls in (SHORT, LONG)
            ]  # fmt: skip
            programs = [job.result() for job in jobs]
        watch = threading.Timer(LIMIT_S, os._exit, (3,))
        watch.start()
        us = [best_us(program, given) for program in programs]
        found = [np.asarray(p(*given)[1].astype(jnp.float32)) for p in (programs[0], programs[2])]
        watch.cancel()
        figures = dict(
            psum=(us[1] - us[0]) / (LONG - SHORT), kernel=(us[3] - us[2]) / (LONG - SHORT),
            difference=float(np.abs(found[0] - found[1]).max()),
            devices_agree=bool((found[1] == found[1][:1]).all()),
        )  # fmt: skip
        print(f"{P} parts of {T} tokens: {figures}", flush=True)
        result["us_of_a_call"][f"{P} parts of {T} tokens"] = figures
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")


def inputs(
    mesh: Mesh, rng: np.random.Generator, P: int, T: int, E: int, places: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the residual, each device's parts, the norm's weight, and places."""

    def put(x: np.ndarray, where: PartitionSpec, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jax.device_put(jnp.asarray(x, dtype), NamedSharding(mesh, where))

    x, parts = rng.normal(size=(T, E)), 0.05 * rng.normal(size=(mesh.size, P, T, E))
    own = put(parts, OWN, jnp.float32 if P > 1 else jnp.bfloat16)  # as products leave them
    return put(x, WHOLE), own, put(1 + 0.1 * rng.normal(size=E), WHOLE), places


if __name__ == "__main__":
    main()
