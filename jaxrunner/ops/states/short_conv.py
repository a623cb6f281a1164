"""Causal convolutions of a few tokens, each channel by itself, over the rows of a step.

What a row's first tokens read of those before them lies in the state of their request.
"""

from dataclasses import replace
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jaxrunner.caches.state import ConvParts, StateCache
from jaxrunner.indexing import take
from jaxrunner.kernels_pallas.states import conv_step
from jaxrunner.kernels_pallas.states.conv_step import EPS
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops.states.state_rows import StateRows, counted, put, state_rows
from jaxrunner.types import Array, Batch


def convolve(
    candidates: tuple[Operation, ...], batch: Batch, x: Array, weight: Array, bias: Array | None,
    cache: StateCache, group: int, parts: ConvParts | None = None, *, note: Note = unnoted,
) -> tuple[Any, StateCache]:  # fmt: skip
    """Returns the convolution of x, [T, C], and the cache with the last inputs of each row.

    weight: [C, W], that of the token itself last; bias: [C]. Sums are float32. With `parts` x is
    [T, G, M], weight [G, C, W] and bias [G, C], and the parts are returned in place of sums.
    """
    rows = state_rows(batch, group, cache)
    args = batch, rows, x, weight, bias, cache, parts
    y, conv = run_first("convolve", candidates, *args, note=note)
    cache = replace(cache, conv=conv)
    if cache.drafted_conv is not None:
        drafted = put(cache.drafted_conv, rows, rows.drafted(_read(x, parts)))
        cache = replace(cache, drafted_conv=drafted)
    if cache.recurrent is None:  # else what carries matrices on counts, behind this
        cache = replace(cache, count=counted(rows, cache.count))
    return y, cache


def _plain(
    batch: Batch, rows: StateRows, x: Array, weight: Array, bias: Array | None, cache: StateCache,
    parts: ConvParts | None,
) -> tuple[Any, Array]:  # fmt: skip
    """Returns the convolution, and the last inputs of all requests, [N, taps, C]."""
    old, x = _before(rows, cache), _read(x, parts)
    y = _summed(x, weight, bias, old, batch.row, rows.start)
    kept = _last_inputs(x, old, rows.start, rows.taken)
    conv = put(cache.conv, rows, kept)
    if not batch.query_len:
        # XLA could write this state behind the last layer, and hold x of all layers until then.
        y, conv = lax.optimization_barrier((y, conv))
    return _split(y, weight, parts), conv


def one_token(
    batch: Batch, rows: StateRows, x: Array, weight: Array, bias: Array | None, cache: StateCache,
    parts: ConvParts | None, *, interpret: Any = None,
) -> tuple[Any, Array]:  # fmt: skip
    """Does the same for rows of one token each, in one kernel."""
    given = cache.conv, x, weight, bias, rows.source(), rows.places[:, 0]
    conv, y = conv_step.conv_step(*given, parts=parts, interpret=interpret)
    return y, conv


def _refuses(
    batch: Batch, rows: StateRows, x: Array, weight: Array, bias: Array | None, cache: StateCache,
    parts: ConvParts | None,
) -> str | None:  # fmt: skip
    if batch.query_len != 1 or cache.drafted_conv is not None:
        return "wants rows of one token each, which verify no drafts"
    return conv_step.refuses(cache.conv, x, weight, bias, parts)


def _read(x: Array, parts: ConvParts | None) -> Array:
    """Returns what is convolved of x, [T, C]."""
    if parts is None:
        return x
    return x[..., parts.start : parts.start + parts.channels].reshape(x.shape[0], -1)


def _split(y: Array, weight: Array, parts: ConvParts | None) -> Any:
    """Returns sums, [T, C], or the parts of what SiLU makes of them, [T, G, n] each."""
    if parts is None:
        return y
    y = jax.nn.silu(y.reshape(y.shape[0], *weight.shape[:2]).astype(jnp.float32))
    cut = ((y[..., first : first + num], norm) for first, num, norm in parts.spans)
    return tuple(_normed(part, norm) if norm else part for part, norm in cut)


def _normed(x: Array, norm: float) -> Array:
    return x * (lax.rsqrt((x * x).sum(-1, keepdims=True) + EPS) * norm)


PLAIN = (Operation("plain JAX", _plain),)
KERNELS = (Operation("conv_step", one_token, _refuses), *PLAIN)


def _before(rows: StateRows, cache: StateCache) -> Array:
    """Returns the last inputs before each row, [B, taps, C], the oldest first; zeros before it."""
    source = rows.source()
    old = take(cache.conv, source)
    if cache.drafted_conv is None:
        return old
    taps, kept = old.shape[1], jnp.concatenate([old, take(cache.drafted_conv, source)], 1)
    at = rows.waiting[:, None] + jnp.arange(taps)[None]
    return jnp.take_along_axis(kept, at[:, :, None], 1)


def _last_inputs(x: Array, old: Array, start: Array, num: Array) -> Array:
    """Returns the inputs before the token `num` of each row, [B, taps, C], the oldest first."""
    taps = old.shape[1]
    i = num[:, None] + jnp.arange(taps)[None]  # among old and new ones
    kept = jnp.take_along_axis(old, jnp.minimum(i, taps - 1)[:, :, None], 1)
    new = take(x, jnp.maximum(start[:, None] + i - taps, 0))
    return jnp.where((i < taps)[:, :, None], kept, new.astype(old.dtype))


def trained(
    batch_size: int, x: Array, weight: Array, bias: Array | None, cache: Any, group: int,
    parts: ConvParts | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Returns the convolution of x, [T, C], `batch_size` equal sequences; and the cache."""
    x = _read(x, parts)
    T, channels = x.shape
    row = jnp.repeat(jnp.arange(batch_size), T // batch_size, total_repeat_length=T)
    start = jnp.arange(batch_size) * (T // batch_size)
    old = jnp.zeros((batch_size, weight.shape[-1] - 1, channels), x.dtype)
    return _split(_summed(x, weight, bias, old, row, start), weight, parts), cache


def _summed(
    x: Array, weight: Array, bias: Array | None, old: Array, row: Array, start: Array
) -> Array:
    """Returns the sums over the inputs of each token and of those before it, [T, C].

    old: inputs before each row, [B, W - 1, C]; start: its first token, [B].
    """
    (T, channels), taps = x.shape, weight.shape[-1] - 1
    t = jnp.arange(T)
    offset = t - take(start, row)
    w = weight.reshape(channels, -1).astype(jnp.float32)
    y = jnp.zeros((T, channels), jnp.float32)
    for back in range(taps, -1, -1):
        here = x if not back else take(x, jnp.maximum(t - back, 0))
        if back:
            before = take(old, (row, taps - back + offset))  # 0 where that is in the row
            here = jnp.where((offset >= back)[:, None], here, before.astype(x.dtype))
        y = y + here.astype(jnp.float32) * w[:, taps - back][None]
    y = y if bias is None else y + bias.reshape(-1).astype(jnp.float32)[None]
    return y.astype(x.dtype)
