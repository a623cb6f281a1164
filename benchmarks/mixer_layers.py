"""Kernels of one layer that carries a state on: steps that decode or verify drafts, and prompts.

python benchmarks/mixer_layers.py granite4_h_tiny qwen35_9b --out FILE

Microseconds a call by JAX's profiler, of a mixer alone, an L2 cache full of others, weights of one
deviation. Programs are few and small: they compile in seconds, where those of a whole model take a
minute.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.bench.device_time import median_us, profiled
from jaxrunner.bench.presets import PRESETS
from jaxrunner.bench.workloads import machine
from jaxrunner.hf_config import Settings
from jaxrunner.models.hybrids.delta_net import DeltaNet
from jaxrunner.models.hybrids.mamba2 import Mixer
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.types import Batch, Inputs

# Rows, tokens of each, and drafts that a row may verify.
CASES = {
    "8 rows decode": (8, 1, 0),
    "64 rows decode": (64, 1, 0),
    "64 rows verify 3 drafts": (64, 4, 3),
    "2 prompts of 4096": (2, 4096, 0),
}
FIRST, CALLS, NUM_BLOCKS = 1024, 5, 65


def batch_of(rows: int, num: int) -> Batch:
    """Returns a step of equal rows, which go on at `FIRST`, or of whole prompts."""
    T, none = rows * num, jnp.zeros(rows * num, jnp.int32)
    first, query_len = (0, 0) if num > 16 else (FIRST, num)
    return Batch(
        inputs=Inputs(none, none, none), row=jnp.asarray(np.arange(T) // num, jnp.int32), slot=none,
        cache_index=(), query_start=jnp.arange(rows + 1, dtype=jnp.int32) * num,
        seq_lens=jnp.full(rows, first + num, jnp.int32),
        blocks=(jnp.arange(rows, dtype=jnp.int32)[:, None],), logits_indices=none,
        query_len=query_len,
    )  # fmt: skip


def program(preset: str, rows: int, num: int, drafts: int) -> tuple[Any, tuple[Any, ...]]:
    """Returns a lowered call of a preset's mixer, and its arguments."""
    model, config = read_model(Settings(PRESETS[preset].config))
    model_config: Any = config
    kind, at = model_config.state, model_config.attends.index(False)
    dims = config.dims | dict(param=jnp.dtype("bfloat16"))
    more = dict(N=NUM_BLOCKS, drafted=drafts, drafts=drafts > 0, S=2**30)
    cache = pytree.zeros(kind.leaves, dims | kind.dims | more)
    if drafts:  # two of the drafts before stood
        cache = replace(cache, count=jnp.full(NUM_BLOCKS, FIRST - 2, jnp.int32))
    layer: Any = pytree.abstract(model.params, dims).layers[at]
    mixer = Mixer if isinstance(layer, Mixer) else DeltaNet
    key, T = jax.random.key(0), rows * num

    def made(x: Any) -> jax.Array:
        return (jax.random.normal(key, x.shape, jnp.float32) * 0.02).astype(x.dtype)

    names = [field.name for field in fields(mixer)]
    weights = mixer(**{name: jax.tree.map(made, getattr(layer, name)) for name in names})
    x = jax.random.normal(key, (T, config.hidden_size), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=2)
    def run(x: Any, weights: Any, cache: Any, batch: Batch) -> Any:
        out, cache = weights.mix(config, backends.fused(batch), x, cache, 0)
        return out if out.ndim == 2 else out.astype(jnp.float32).sum(0), cache

    args = x, weights, cache, batch_of(rows, num)
    return run.lower(*args), args


def kernels_of(run: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Returns microseconds and launches of a call, and those of its longest kernels."""
    x, weights, cache, batch = args
    kept = [run(x, weights, cache, batch)[1]]

    def call() -> Any:
        _, kept[0] = run(x, weights, kept[0], batch)
        return kept[0]

    calls = profiled([call] * CALLS)
    found = {name: sum(sum(kernels.get(name, ())) for kernels in calls) for name in calls[0]}
    longest = sorted(found, key=lambda name: -found[name])[:12]
    return dict(
        us=median_us(calls),
        launches=sum(map(len, calls[0].values())),
        kernels={name: found[name] / CALLS for name in longest},
    )


def main() -> None:
    """Profiles the cases of presets, and prints or writes the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="+", choices=PRESETS)
    parser.add_argument("--out", type=Path, help="file for the JSON")
    args = parser.parse_args()
    result: dict[str, Any] = dict(machine())
    for preset in args.presets:
        lowered = {name: program(preset, *case) for name, case in CASES.items()}
        with ThreadPoolExecutor(len(lowered)) as pool:
            runs = pool.map(lambda one: one[0].compile(), lowered.values())
        for run, (name, (_, given)) in zip(runs, lowered.items(), strict=True):
            result[f"{preset}: {name}"] = kernels_of(run, given)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
