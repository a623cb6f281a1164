"""Rotary positions, norms of heads, and the KV cache written in place, in one kernel.

A thread block serves one token's `kv_heads` KV heads. The first half of a head and the second are
two tiles of the same layout, so that a pair D / 2 apart lies in one thread and nothing is shuffled
but the sums of the norms. Nothing passes through shared memory: no barrier, no descriptor.
"""

from dataclasses import dataclass
import functools
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.kernels_pallas import mosaic, pdl
from jaxrunner.kernels_pallas.mosaic import Layout, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put
from jaxrunner.types import Array

LANES, WARPS = 32, 4  # of a warpgroup, the thread of Mosaic
CACHE_DTYPES = (jnp.bfloat16, jnp.float16)
BLOCKS = 264  # two thread blocks a multiprocessor of H200: below that, tokens are cut up


@dataclass(frozen=True)
class TuningConfig:
    """How the work is cut."""

    kv_heads: int = 0  # KV heads a thread block serves; 0: all, fewer where tokens are few


def refuses(
    qkv: Shaped, cos: Shaped, sin: Shaped, cache_k: Shaped, cache_v: Shaped, cache_index: Shaped,
    q_norm: Shaped | None = None, k_norm: Shaped | None = None,
    *, dtype: DTypeLike | None = None, config: TuningConfig = TuningConfig(),
) -> str | None:  # fmt: skip
    """Returns why these shapes and dtypes are not served, None if they are."""
    if qkv.ndim not in (4, 5):
        return f"qkv must be [T, K, P, D], or parts of it, got {list(qkv.shape)}"
    dtype, (T, K, P, D) = jnp.dtype(dtype or qkv.dtype), qkv.shape[-4:]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"qkv must be bfloat16 or float16, got {dtype}"
    wanted = dtype if qkv.ndim == 4 else jnp.dtype(jnp.float32)
    if qkv.dtype != wanted:
        return f"qkv {list(qkv.shape)} must be {wanted}, got {qkv.dtype}"
    if P < 3:
        return f"qkv must pack at least 3 heads along P (a query, key and value), got {P}"
    if D not in (32, 64, 128, 256):
        return f"the head dim must be 32, 64, 128 or 256, got {D}"
    if T < 1:
        return "at least 1 token is needed, got 0"
    for name, x in ("cos", cos), ("sin", sin):
        if x.shape != (T, 1, D // 2) or x.dtype != jnp.float32:
            got = f"{x.dtype} {list(x.shape)}"
            return f"{name} must turn whole heads, float32 [{T}, 1, {D // 2}], got {got}"
    if cache_k.shape != cache_v.shape or cache_k.dtype != cache_v.dtype:
        return f"the caches must be alike, got {cache_k.shape} and {cache_v.shape}"
    if cache_k.ndim != 4 or (cache_k.shape[1], cache_k.shape[3]) != (K, D):
        return f"the caches must be [N, {K}, S, {D}], got {list(cache_k.shape)}"
    if cache_k.dtype not in CACHE_DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in CACHE_DTYPES)
        return f"the caches must be of {names}, got {cache_k.dtype}"
    if cache_index.shape != (T,) or cache_index.dtype != jnp.int32:
        return f"cache_index must be int32 [{T}], got {cache_index.dtype} {cache_index.shape}"
    if (q_norm is None) != (k_norm is None):
        return "q_norm and k_norm must be given both or neither"
    for name, w in ("q_norm", q_norm), ("k_norm", k_norm):
        if w is not None and (w.shape != (D,) or w.dtype != dtype):
            return f"{name} must be {dtype} [{D}], got {w.dtype} {list(w.shape)}"
    if config.kv_heads and K % config.kv_heads:
        return f"kv_heads={config.kv_heads} must divide the {K} KV heads"
    return None


def rope_write(
    qkv: Array, cos: Array, sin: Array, cache_k: Array, cache_v: Array, cache_index: Array,
    q_norm: Array | None = None, k_norm: Array | None = None,
    *, eps: float, one_more: bool = False, dtype: DTypeLike | None = None,
    config: TuningConfig = TuningConfig(),
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Norms and turns the queries and keys of qkv, [T, K, P, D], and writes keys and values.

    qkv may be parts, [parts, T, K, P, D] in float32, whose sums are rounded to `dtype`.
    cos, sin: [T, 1, D / 2], float32, as `rope.rotation` makes them; pairs are D / 2 apart.
    cache_k, cache_v: [N, K, S, D], written in place where the caller donates them. Token t goes to
    [n, :, s] with cache_index[t] = n * S + s; an index of N * S or more, or below 0, writes
    nothing. q_norm, k_norm: [D], weights of RMSNorm over each head, with `one_more` less one.
    Returns the queries, [T, H, D], and the caches.

    Raises:
      ValueError: what `refuses` says.
    """
    args = qkv, cos, sin, cache_k, cache_v, cache_index, q_norm, k_norm
    if why := refuses(*args, dtype=dtype, config=config):
        raise ValueError(why)
    dtype, (*parts, T, K, P, D) = jnp.dtype(dtype or qkv.dtype), qkv.shape
    G, half = P - 2, D // 2
    N, _, S, _ = cache_k.shape
    C = config.kv_heads or _kv_heads(T, K)
    halves, shapes = (slice(0, half), slice(half, D)), ((C, G), (C,))
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    k_out, v_out = jax.new_ref(cache_k), jax.new_ref(cache_v)

    def kernel(qkv_ref: Ref, at_ref: Ref, *refs: Ref) -> None:
        *rest, k_ref, v_ref, q_ref = refs
        turns, norm_refs = rest[:4], rest[4:]
        t, c = lax.axis_index("t"), pl.ds(lax.axis_index("c") * C, C)
        weights = [
            [_load(ref.at[h], _by_column(rows, half)) for h in halves]
            for ref, rows in zip(norm_refs, shapes, strict=False)
        ]
        pdl.begin()

        def read(heads: slice | int, h: slice, layout: Layout) -> Array:
            """Loads columns h of the token's heads; of parts their sum."""
            if not parts:
                return _load(qkv_ref.at[t, c, heads, h], layout)
            found = [_load(qkv_ref.at[i, t, c, heads, h], layout) for i in range(parts[0])]
            return functools.reduce(jnp.add, found).astype(dtype)

        def turned(i: int, heads: slice | int) -> list[Array]:
            """Loads queries (i = 0) or keys (1), norms and turns them; returns their halves."""
            rows = shapes[i]
            layout, row = _layout(rows, half), _by_column(rows, half)
            both = [read(heads, h, layout) for h in halves]
            if norms:
                both = _rms_norm(both, weights[i], eps, one_more)
            # Equal loads are merged before layouts are inferred, and queries and keys have two
            # layouts: each reads cosine and sine through references of its own.
            cos, sin = (_spread(_load(ref.at[t, 0], row), (*rows, half)) for ref in turns[i::2])
            a, b = (x.astype(jnp.float32) for x in both)
            return [x.astype(dtype) for x in (a * cos - b * sin, b * cos + a * sin)]

        def write(cache_ref: Ref, x: Array, h: slice) -> None:
            """Writes columns h of the token's keys or values."""
            if x.dtype != cache_k.dtype:
                x = x.astype(jnp.float32)
            put(cache_ref.at[lax.div(at, S), c, lax.rem(at, S), h], x.astype(cache_k.dtype))

        at = at_ref[t]
        q, k = turned(0, slice(0, G)), turned(1, G)
        v = read(G + 1, slice(0, D), _layout((C,), D))
        for h, x in zip(halves, q, strict=True):
            put(q_ref.at[t, c, :, h], x)

        @pl.when((at >= 0) & (at < N * S))
        def _() -> None:
            for h, x in zip(halves, k, strict=True):
                write(k_ref, x, h)
            write(v_ref, v, slice(0, D))

    q = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((T, K, G, D), dtype),
        grid=(T, K // C),
        grid_names=("t", "c"),
        kernel_name="rope_write",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(qkv, cache_index, cos, cos, sin, sin, *norms, k_out, v_out)
    return q.reshape(T, K * G, D), jax.freeze(k_out), jax.freeze(v_out)


def _kv_heads(T: int, K: int) -> int:
    """Returns the KV heads a thread block serves: fewer where tokens are few."""
    return next(C for C in range(K, 0, -1) if K % C == 0 and (T * (K // C) >= BLOCKS or C == 1))


def _load(ref: Ref, layout: Layout) -> Array:
    return mosaic.load(ref, layout=layout, optimized=False)


def _by_column(rows: tuple[int, ...], width: int) -> Layout:
    """Lays out [width] as the columns of a tile, [*rows, width]."""
    return _layout(rows, width).reduce(range(len(rows)))


def _spread(x: Array, shape: tuple[int, ...]) -> Array:
    """Repeats x, [D / 2], over all heads."""
    return lax.broadcast_in_dim(x, shape, [len(shape) - 1])


def _rms_norm(parts: list[Array], weights: list[Array], eps: float, one_more: bool) -> list[Array]:
    """RMSNorm over the last axis of heads that are given as halves; rounds as `rms_norm` does, or
    with `one_more` as `rms_norm_of_one_more`."""
    shape, dtype = parts[0].shape, parts[0].dtype
    a, b = (x.astype(jnp.float32) for x in parts)
    mean = (a * a + b * b).sum(-1) / (2 * shape[-1])
    gain = lax.broadcast_in_dim(lax.rsqrt(mean + eps), shape, list(range(len(shape) - 1)))
    both = zip((a * gain, b * gain), weights, strict=True)
    if one_more:
        return [(x * _spread(1 + w.astype(jnp.float32), shape)).astype(dtype) for x, w in both]
    return [x.astype(dtype) * _spread(w, shape) for x, w in both]


def _layout(rows: tuple[int, ...], width: int) -> Layout:
    """Spreads a tile [*rows, width] over a warpgroup, at most 8 neighbours (16 bytes) a thread.

    As wide as leaves no thread idle; threads without work of their own repeat that of others.
    """
    shares = [_share(rows, width, vec) for vec in (8, 4, 2, 1) if LANES * vec >= width]
    vec, lanes, warps, spare = next((s for s in shares if s[-1] == [1, 1]), shares[-1])
    tiles = (*(a * b for a, b in zip(lanes, warps, strict=True)), width), (*lanes, width), (vec,)
    rank = len(rows) + 1
    end = 1 + rank  # dimensions from the second tile on
    layout = mgpu.TiledLayout(
        plgpu.Tiling(tiles),
        (*_replicated(spare[1]), *(i - end - rank for i in range(len(rows)))),
        (*_replicated(spare[0]), *(i - end for i in range(rank))),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def _share(
    rows: tuple[int, ...], width: int, vec: int
) -> tuple[int, list[int], list[int], list[int]]:
    """Deals rows to lanes, then to warps, `vec` numbers a thread; says how often each is left."""
    size, spare = list(rows), [LANES * vec // width, WARPS]
    shares = [1] * len(rows), [1] * len(rows)
    for level, share in enumerate(shares):
        for i in reversed(range(len(rows))):
            share[i] = math.gcd(size[i], spare[level])
            size[i], spare[level] = size[i] // share[i], spare[level] // share[i]
    return vec, *shares, spare


def _replicated(times: int) -> tuple[plgpu.Replicated, ...]:
    return (plgpu.Replicated(times),) if times > 1 else ()
