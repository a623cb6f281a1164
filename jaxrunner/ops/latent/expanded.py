"""Latent attention of prompts to keys and values of each head, made of the latents of their rows.

Absorbed, a score is a sum of `kv_lora_rank` + `qk_rope_head_dim` products, and a value has
`kv_lora_rank` numbers: 576 and 512 of DeepSeek's models. A head's own keys and values have 192 and
128, and are made once for all tokens of a row: less work where there are many. arXiv:2405.04434
"""

from collections.abc import Callable
from dataclasses import replace
import functools

import jax
import jax.numpy as jnp

from jaxrunner.caches.latent import LatentCache
from jaxrunner.indexing import find_rows, take
from jaxrunner.kernels_pallas.attention import prefill_attention as kernel
from jaxrunner.linear import precision_of
from jaxrunner.model import AttentionSpec
from jaxrunner.operation import Operation
from jaxrunner.ops.latent.attention import unlike
from jaxrunner.types import Array, Batch, LayerCache

LEAST_TOKENS = 512  # of a step; fewer are as many rows of the decode kernel
ROOM = 2  # times a step's tokens, of the rows' tokens that keys are made of, cached ones too
Attend = Callable[[Batch, Array, LayerCache, AttentionSpec], Array]
Absorbed = Callable[[Batch, Array], Array]  # (batch, q [T, H, N + D]) -> [T, H, V]


def expanded(
    batch: Batch, q: Array, up: Array, cache: LatentCache, spec: AttentionSpec, absorbed: Absorbed,
    *, attend: Attend,
) -> Array:  # fmt: skip
    """Attends q, [T, H, N + D], to the latents of each token's row; returns [T, H, V].

    Rows of one token are absorbed, and so are all where the others have more tokens than there is
    room for. up: [N + V, H, R]; attend: does it for keys and values, and rows may be empty.
    """
    S, start, lens = cache.latents.shape[1], batch.query_start, batch.seq_lens
    num = start[1:] - start[:-1]
    used = jnp.where(num > 1, -(-lens // S), 0)  # blocks
    ends, room = jnp.cumsum(used), max(1, ROOM * q.shape[0] // S)

    def by_heads() -> Array:
        table = batch.blocks[spec.group]
        kv = _heads(cache.latents[_blocks(table, ends, used, room)], up, spec, q.shape[-1])
        own = (ends - used)[:, None] + jnp.arange(table.shape[1])[None]
        tables = tuple(own if g == spec.group else x for g, x in enumerate(batch.blocks))
        longer = replace(batch, seq_lens=jnp.where(num > 1, lens, 0), blocks=tables)
        out = attend(longer, q, kv, spec._replace(value_dim=None))[
            ..., : _num_values(q, up, cache, spec)
        ]
        first = jnp.where(num == 1, start[:-1], q.shape[0])
        singles = absorbed(_of_one(batch, num), take(q, first))
        return out.at[first].set(singles, mode="drop", unique_indices=True)

    return jax.lax.cond(ends[-1] <= room, by_heads, lambda: absorbed(batch, q))


def _num_values(q: Array, up: Array, cache: LatentCache, spec: AttentionSpec) -> int:
    """Returns V: what `up` makes behind the N numbers of a key that are not turned."""
    turned = cache.latents.shape[-1] - (spec.value_dim or 0)
    return up.shape[0] - (q.shape[-1] - turned)


def _blocks(table: Array, ends: Array, used: Array, room: int) -> Array:
    """Returns the blocks of the rows, one row behind the other, [room]; behind them any."""
    place = jnp.arange(room)
    row = find_rows(ends, place)
    column = place - take(ends - used, row)
    return jnp.where(row < len(ends), take(table, (row, column)), 0)


def _heads(latents: Array, up: Array, spec: AttentionSpec, width: int) -> LayerCache:
    """Returns keys, and values as wide, [room, H, S, N + D], of latents, [room, S, R + D]."""
    rank = spec.value_dim or 0
    latent_WSR, turned_WSD = latents[..., :rank], latents[:, None, :, rank:]
    num_still = width - turned_WSD.shape[-1]
    product = functools.partial(jnp.einsum, "wsr,ohr->whso", latent_WSR, precision=precision_of(up))
    still, values = product(up[:num_still]), product(up[num_still:])
    turned = jnp.broadcast_to(turned_WSD, (*still.shape[:3], turned_WSD.shape[-1]))
    padding = (*((0, 0),) * 3, (0, width - values.shape[-1]))
    k, v = jnp.concatenate([still, turned], -1), jnp.pad(values, padding)
    return LayerCache(k=k, v=v, k_scale=None, v_scale=None)


def _of_one(batch: Batch, num: Array) -> Batch:
    """Returns the rows of one token, each at its row's place; others are empty."""
    lens, place = jnp.where(num == 1, batch.seq_lens, 0), jnp.arange(len(num) + 1)
    inputs = replace(batch.inputs, positions=jnp.maximum(lens - 1, 0))
    return replace(
        batch, inputs=inputs, row=place[:-1], query_start=place, seq_lens=lens, query_len=1
    )


def refuses(
    batch: Batch, q: Array, up: Array, cache: LatentCache, spec: AttentionSpec, absorbed: Absorbed
) -> str | None:
    """Says why keys and values are not made, for the kernel of prompts; None if they are."""
    if batch.query_len:
        return f"wants rows side by side, not {batch.query_len} tokens apart"
    if (got := q.shape[0]) < LEAST_TOKENS:
        return f"wants steps of {LEAST_TOKENS} tokens, got {got}"
    if not isinstance(up, jax.Array):
        return f"wants weights without adapters, got {type(up).__name__}"
    if (reason := unlike(cache, spec)) is not None:
        return reason
    (_, H, width), V = q.shape, _num_values(q, up, cache, spec)
    if V > width:
        return f"wants values no wider than keys, got {V} and {width}"
    shape = 1, H, cache.latents.shape[1], width
    return kernel.refuses(q, jax.ShapeDtypeStruct(shape, cache.latents.dtype))


def _kernel(batch: Batch, q: Array, kv: LayerCache, spec: AttentionSpec) -> Array:
    rows = batch.blocks[spec.group], batch.query_start, batch.seq_lens
    return kernel.prefill_attention(q, kv.k, kv.v, *rows, scale=spec.scale)


EXPANDED = Operation("expanded", functools.partial(expanded, attend=_kernel), refuses)
# (batch, q [T, H, N + D], up, cache, spec, absorbed) -> [T, H, V], asked before absorbed attention.
PROMPTS = (EXPANDED,)
