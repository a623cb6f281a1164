"""What latent attention over the paged cache runs through, by the rows of a batch."""

from collections.abc import Sequence
import functools
from typing import Any

import jax.numpy as jnp

from jaxrunner.caches.latent import LatentCache
from jaxrunner.kernels_pallas import latent_decode, latent_reference
from jaxrunner.model import AttentionSpec
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.ops import cpu_attention
from jaxrunner.types import Array, Batch


def attend_latent(
    operations: Sequence[Operation], batch: Batch, note: Note,
    q: Array, latents: Array, cache: Any, spec: AttentionSpec,
) -> tuple[Array, LatentCache]:  # fmt: skip
    """Writes latents, [T, D], then attends q, [T, H, D], by the first operation that serves it.

    Returns [T, H, spec.value_dim], and the cache, which is consumed.
    """
    cache = latent_reference.write_latents(batch, latents, cache, spec.group)
    return run_first("attention", operations, batch, q, cache, spec, note=note), cache


def trained(
    batch_size: int, note: Note, q: Array, latents: Array, cache: None, spec: AttentionSpec
) -> tuple[Array, None]:
    """Does so of `batch_size` equal sequences, without a cache."""
    run = functools.partial(latent_reference.dense, batch_size)
    return run_first("attention", (Operation("plain JAX", run),), q, latents, spec, note=note), None


def _decode(batch: Batch, q: Array, cache: LatentCache, spec: AttentionSpec) -> Array:
    blocks, lens, rank = batch.blocks[spec.group], batch.seq_lens, spec.value_dim or 0
    if batch.query_len != 1:  # a token of a prompt, or a draft, is a row that ends with it
        in_a_row = batch.row < lens.shape[0]
        blocks = blocks[jnp.minimum(batch.row, lens.shape[0] - 1)]
        lens = jnp.where(in_a_row, batch.inputs.positions + 1, 0)
    return latent_decode.latent_decode(q, cache.latents, blocks, lens, scale=spec.scale, rank=rank)


def _refuses_decode(batch: Batch, q: Array, cache: LatentCache, spec: AttentionSpec) -> str | None:
    if cache.scale is not None:
        return f"wants latents without scales, got {cache.latents.dtype}"
    partly = spec.window is not None or spec.chunk_size is not None
    if partly or spec.soft_cap is not None or spec.sinks is not None:
        return "wants attention to all keys, without a cap or sinks"
    return latent_decode.refuses(q, cache.latents, spec.value_dim or 0)


# (batch, q [T, H, D], cache, spec) -> causal attention over each token's request, of its latents'
# values: [T, H, value_dim].
PLAIN = (
    Operation(
        "plain JAX, by tiles",
        functools.partial(latent_reference.attend, of_one_head=cpu_attention.attend),
        cpu_attention.refuses,
    ),
    Operation("plain JAX", latent_reference.attend),
)
LATENT_ATTENTION = (Operation("latent_decode", _decode, _refuses_decode), *PLAIN)
