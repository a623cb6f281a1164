"""The implementations of latent attention over the paged cache, by the rows of a batch.

Absorbed: a head's queries are multiplied with what would make its keys of latents, and attend to
the latents themselves, which are values too.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.latent import LatentCache
from jaxrunner.kernels_pallas.attention import latent_decode, latent_reference
from jaxrunner.kernels_pallas.attention.latent_decode import TuningConfig
from jaxrunner.linear import per_head
from jaxrunner.model import AttentionSpec
from jaxrunner.operation import Note, Operation, run_first
from jaxrunner.ops import cpu_attention
from jaxrunner.types import Array, Batch

PerHead = Callable[[str, Array, Any, slice], Array]  # as `Ops.per_head`


def attend_latent(
    operations: Sequence[Operation], batch: Batch, note: Note,
    q: Array, latents: Array, up: Any, cache: Any, spec: AttentionSpec,
    *, per_head: PerHead = per_head, prompts: Sequence[Operation] = (),
) -> tuple[Array, LatentCache]:  # fmt: skip
    """Writes latents, [T, R + D], then attends q, [T, H, N + D], as `Ops.attend_latent` does.

    operations: of absorbed attention, the first one that serves it; prompts: asked before it.
    Returns [T, H, V], and the cache, which is consumed.
    """
    cache = latent_reference.write_latents(batch, latents, cache, spec.group)

    def run_absorbed(batch: Batch, q: Array) -> Array:
        def attend(q: Array) -> Array:
            return run_first("attention", operations, batch, q, cache, spec, note=note)

        return absorbed(attend, per_head, q, latents, up, spec)

    known = (*prompts, Operation("absorbed", lambda batch, q, *_: run_absorbed(batch, q)))
    args = batch, q, up, cache, spec, run_absorbed
    return run_first("latent attention", known, *args, note=note), cache


def trained(
    batch_size: int, note: Note,
    q: Array, latents: Array, up: Any, cache: None, spec: AttentionSpec,
    *, per_head: PerHead = per_head,
) -> tuple[Array, None]:  # fmt: skip
    """Does so of `batch_size` equal sequences, without a cache."""

    def attend(q: Array) -> Array:
        run = functools.partial(latent_reference.dense, batch_size)
        return run_first("attention", (Operation("plain JAX", run),), q, latents, spec, note=note)

    return absorbed(attend, per_head, q, latents, up, spec), None


def absorbed(
    attend: Callable[[Array], Array], per_head: PerHead, q: Array, latents: Array, up: Any,
    spec: AttentionSpec,
) -> Array:  # fmt: skip
    """Attends q, [T, H, N + D], by attention to latents, [T, R + D]. Returns [T, H, V]."""
    num_turned = latents.shape[-1] - (spec.value_dim or 0)
    still_THN, turned_THD = jnp.split(q, [num_still := q.shape[-1] - num_turned], -1)
    absorbed_THR = per_head("thn,nhr->thr", still_THN, up, slice(num_still))
    out_THR = attend(jnp.concatenate([absorbed_THR, turned_THD], -1))
    return per_head("thr,vhr->thv", out_THR, up, slice(num_still, None))


def _decode(
    config: TuningConfig, batch: Batch, q: Array, cache: LatentCache, spec: AttentionSpec
) -> Array:
    blocks, lens, rank = batch.blocks[spec.group], batch.seq_lens, spec.value_dim or 0
    if batch.query_len != 1:  # a token of a prompt, or a draft, is a row that ends with it
        in_a_row = batch.row < lens.shape[0]
        blocks = blocks[jnp.minimum(batch.row, lens.shape[0] - 1)]
        lens = jnp.where(in_a_row, batch.inputs.positions + 1, 0)
    sizes: Any = dict(scale=spec.scale, rank=rank, config=config)
    return latent_decode.latent_decode(q, cache.latents, blocks, lens, **sizes)


def _refuses_decode(batch: Batch, q: Array, cache: LatentCache, spec: AttentionSpec) -> str | None:
    return unlike(cache, spec) or latent_decode.refuses(q, cache.latents, spec.value_dim or 0)


def unlike(cache: LatentCache, spec: AttentionSpec) -> str | None:
    """Says why no kernel attends so, or to such latents; None if some may."""
    if cache.scale is not None:
        return f"wants latents without scales, got {cache.latents.dtype}"
    partly = spec.window is not None or spec.chunk_size is not None
    if partly or spec.soft_cap is not None or spec.sinks is not None:
        return "wants attention to all keys, without a cap or sinks"
    return None


def serves(
    num_heads: int, num_dims: int, rank: int, block_size: int, dtype: Any, kv_dtype: Any
) -> bool:
    """Whether the kernel of decode steps reads latents of such sizes, all of a block's tokens."""
    q = jax.ShapeDtypeStruct((1, num_heads, num_dims), dtype)
    latents = jax.ShapeDtypeStruct((1, block_size, num_dims), kv_dtype)
    return latent_decode.refuses(q, latents, rank) is None


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
LATENT_ATTENTION, BATCH_INVARIANT_LATENT_ATTENTION = (
    (Operation("latent_decode", functools.partial(_decode, config), _refuses_decode), *PLAIN)
    for config in (TuningConfig(), TuningConfig(batch_invariant=True))
)
