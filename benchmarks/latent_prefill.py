"""Latent attention of prompts on a GPU: absorbed, and by keys and values of each head.

One layer of DeepSeek-V2-Lite's sizes (16 heads) and of V3's (128). Prints the time of a call, how
many times faster the second is, and how far apart the two are.

python benchmarks/latent_prefill.py --out FILE
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.bench.device_time import median_us, profiled
from jaxrunner.bench.workloads import machine
from jaxrunner.caches.latent import LatentCache
from jaxrunner.model import AttentionSpec
from jaxrunner.operation import unnoted
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.latent.expanded import EXPANDED
from jaxrunner.types import Array, Batch, Inputs

STILL, TURNED, VALUE, RANK, S = 128, 64, 128, 512, 64
CALLS = 9
SPEC = AttentionSpec(0, None, (STILL + TURNED) ** -0.5, value_dim=RANK)
# Tokens that each row computes, and those before them.
STEPS = {
    "8 x 1024": ([1024] * 8, [0] * 8),
    "2 x 4096": ([4096] * 2, [0] * 2),
    "1 x 8192": ([8192], [0]),
    "1 x 4096 upon 4096": ([4096], [4096]),
    "1 x 2048 upon 4096, and 64 x 1 upon 1024": ([2048] + [1] * 64, [4096] + [1024] * 64),
}


def make(num: list[int], before: list[int], heads: int) -> tuple[Any, ...]:
    """Returns the arguments of a layer's attention, of random numbers."""
    start, B = np.cumsum([0, *num]).astype(np.int32), len(num)
    T, row = int(start[-1]), np.repeat(np.arange(B), num).astype(np.int32)
    positions = (np.arange(T) - start[row] + np.array(before)[row]).astype(np.int32)
    lens = np.add(num, before).astype(np.int32)
    M = -(-int(lens.max()) // S)
    table = np.random.default_rng(0).permutation(B * M).reshape(B, M).astype(np.int32)
    index = table[row, positions // S] * S + positions % S
    token = jnp.asarray(positions)
    batch = Batch(
        inputs=Inputs(token, token, token + 1), row=jnp.asarray(row), slot=jnp.asarray(row),
        cache_index=(jnp.asarray(index),), query_start=jnp.asarray(start),
        seq_lens=jnp.asarray(lens), blocks=(jnp.asarray(table),),
        logits_indices=jnp.zeros((B, 1), jnp.int32), query_len=0,
    )  # fmt: skip
    shapes = (
        (T, heads, STILL + TURNED), (T, RANK + TURNED), (STILL + VALUE, heads, RANK),
        (B * M, S, RANK + TURNED),
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(*pair, jnp.bfloat16) for pair in zip(keys, shapes, strict=True)]
    q, latents, up, cache = arrays
    return batch, q, latents, up * RANK**-0.5, LatentCache(latents=cache, scale=None)


def attend(
    prompts: tuple[Any, ...], batch: Batch, q: Array, latents: Array, up: Array, cache: LatentCache
) -> Array:
    """Returns what a layer's attention gives, [T, H, V]."""
    known = latent_attention.LATENT_ATTENTION, batch, unnoted
    return latent_attention.attend_latent(*known, q, latents, up, cache, SPEC, prompts=prompts)[0]


def main() -> None:
    """Measures every step with either number of heads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args, out = parser.parse_args(), {}
    run = jax.jit(attend, static_argnums=0)
    for heads in (16, 128):
        for name, (num, before) in STEPS.items():
            given = make(num, before, heads)
            forms = [functools.partial(run, prompts) for prompts in ((), (EXPANDED,))]
            told = [np.asarray(form(*given), np.float32) for form in forms]
            calls = [functools.partial(form, *given) for form in forms for _ in range(CALLS)]
            found = profiled(calls)
            absorbed, expanded = (median_us(x) / 1e3 for x in (found[:CALLS], found[CALLS:]))
            apart = float(np.abs(told[0] - told[1]).max())
            out[f"{name}, {heads} heads"] = dict(
                absorbed_ms=absorbed, expanded_ms=expanded, apart=apart
            )
            print(
                f"{name}, {heads} heads: absorbed {absorbed:.3f} ms, expanded "
                f"{expanded:.3f} ms, {absorbed / expanded:.2f} times, apart {apart:.4f}",
                flush=True,
            )
            args.out.write_text(json.dumps({**machine(), "ms": out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
