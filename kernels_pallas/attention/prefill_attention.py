"""Causal attention of many new tokens over a paged KV cache, on Hopper (Mosaic GPU).

The rows of a step are cut into tiles of consecutive tokens. A block of the grid takes (tile, head)
pairs one after the other, the costly ones first: one warpgroup copies queries, keys and values
into shared memory, block by block of the cache, and the others compute, 64 tokens each. A compute
warpgroup starts the product with the next keys and that with the last values together and takes
the softmax while they run; the warpgroups start them in turns, so that one's softmax hides behind
the other's products. After FlashAttention-3, arXiv:2407.08608.
"""

from dataclasses import dataclass, replace
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxrunner.kernels_pallas import mosaic, registers
from jaxrunner.kernels_pallas.attention import prefill_quantized_kv, quantized_kv
from jaxrunner.kernels_pallas.attention.online_softmax import LAYOUT, LOG2_E, NOTHING, PER_ROW, full
from jaxrunner.kernels_pallas.attention.prefill_tiles import tiles
from jaxrunner.kernels_pallas.mosaic import TOO_OLD, Index, Ref, Shaped
from jaxrunner.kernels_pallas.stores import put_tokens
from jaxrunner.types import Array

ROWS = 64  # tokens of a warpgroup: the height of a Hopper matrix product
SMEM_BYTES = 226 * 1024  # of a block, less what barriers need
COMPILER = plgpu.CompilerParams(approx_math=True, lowering_semantics=mgpu.LoweringSemantics.Lane)


@dataclass(frozen=True)
class TuningConfig:
    """Sizes that change speed alone."""

    block_kv: int = 0  # keys of a step; 0: 128, or 64 where registers hold no more
    stages: int = 2  # steps of keys and values that are in shared memory
    warpgroups: int = 2  # that compute; a tile has 64 tokens for each
    registers: tuple[int, int] = (232, 40)  # of a thread that computes, and of one that copies
    registers_8bit: tuple[int, int] = (208, 88)  # where the one that copies converts, too
    num_ctas: int = 132  # one for each multiprocessor of an H200

    def keys(self, D: int) -> int:
        """Returns the keys of a step, for heads of size D."""
        return self.block_kv or (128 if D <= 128 and registers.OWN_REGISTERS else 64)

    def smem_bytes(self, D: int, dtype: DTypeLike) -> int:
        """Returns the bytes of queries, keys and values."""
        more = (
            prefill_quantized_kv.smem_bytes(D, self.keys(D)) if dtype in quantized_kv.DTYPES else 0
        )
        return 2 * D * (ROWS * self.warpgroups + 2 * self.stages * self.keys(D)) + more


class _Static(NamedTuple):
    """The compile-time parameters of the kernel. Shapes are those of `prefill_attention`."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    scale: float
    window: int | None
    soft_cap: float | None
    config: TuningConfig
    keys: int  # of a step
    shared: bool  # results leave through the queries' place, there being no other
    behind: float  # the factor of results


def refuses(q: Shaped, k: Shaped, config: TuningConfig = TuningConfig()) -> str | None:
    """Says why q, [T, H, D], and k, [N, K, S, D], are not served; None if they are."""
    (_, H, D), (_, K, S, _) = q.shape, k.shape
    keys = config.keys(D)
    if TOO_OLD is not None:
        return TOO_OLD
    if k.dtype in quantized_kv.DTYPES:
        if reason := quantized_kv.refuses(q, k):
            return reason
    elif q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"wants q and KV of one dtype, bfloat16 or float16, got {q.dtype} and {k.dtype}"
    if D % 16 or not 64 <= D <= 256 or k.shape[3] != D:
        return f"wants a head_dim that is a multiple of 16 from 64 to 256, got {D}, {k.shape[3]}"
    if H % K:
        return f"wants query heads that are a multiple of the KV heads, got {H} for {K}"
    if S % 8 or keys % 64 or (S % keys and keys % S):
        return f"wants a block_size that divides or is a multiple of {keys}, got {S}"
    if (got := config.smem_bytes(D, k.dtype)) > SMEM_BYTES:
        return f"wants at most {SMEM_BYTES} bytes of shared memory, got {got} of {config}"
    return None


def prefill_attention(
    q: Array, k: Array, v: Array, blocks: Array, query_start: Array, seq_lens: Array, *,
    scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
    config: TuningConfig = TuningConfig(),
) -> Array:  # fmt: skip
    """Attends q, [T, H, D], to the keys of each token's row; returns [T, H, D].

    k, v: [N, K, S, D]; blocks: [B, M] int32, unused entries may be anything; query_start: [B+1]
    and seq_lens: [B], int32. The tokens query_start[b]:query_start[b+1] are the last ones of the
    seq_lens[b] of row b, whose keys are all in the cache. `scale` is positive. `sinks`, [H], are
    logits that join the softmax and have no value. k_scale and v_scale, [N, K, S], are what k and
    v of 8 bits are multiples of: float32 that is bfloat16. Tokens of no row, or of one whose length
    is 0, become 0.

    Raises: ValueError where `refuses` says why.
    """
    out = into(
        q, k, v, blocks, query_start, seq_lens, scale=scale, window=window, soft_cap=soft_cap,
        sinks=sinks, k_scale=k_scale, v_scale=v_scale, config=config,
    )  # fmt: skip
    return jax.freeze(out)[: q.shape[0]].reshape(q.shape)


def into(
    q: Array, k: Array, v: Array, blocks: Array, query_start: Array, seq_lens: Array, *,
    scale: float, window: int | None = None, soft_cap: float | None = None,
    sinks: Array | None = None, k_scale: Array | None = None, v_scale: Array | None = None,
    config: TuningConfig = TuningConfig(),
) -> Any:  # fmt: skip
    """Does what `prefill_attention` does; raises as that.

    Returns a reference, [T, K, H / K, D] and up to 7 tokens more, into which `decode_attention` may
    write; `jax.freeze` makes an array of it.
    """
    if reason := refuses(q, k, config) or quantized_kv.unscaled(k, k_scale, v_scale):
        raise ValueError(f"prefill_attention {reason}")
    (T, H, D), K, dtype = q.shape, k.shape[1], q.dtype
    # Copies into tiled shared memory start at a multiple of 8 tokens.
    q = jnp.pad(q, ((0, -T % 8), (0, 0), (0, 0)))
    tile, keys = ROWS * config.warpgroups, config.keys(D)
    shared = config.smem_bytes(D, k.dtype) + 2 * tile * D > SMEM_BYTES
    behind = prefill_quantized_kv.behind(k.dtype)
    s = _Static(q.shape, k.shape, scale * behind, window, soft_cap, config, keys, shared, behind)
    table = tiles(query_start, seq_lens, T, tile, keys, window)
    args = dict(q=q, k=k, v=v, blocks=blocks.astype(jnp.int32), table=table)
    args |= {} if k_scale is None else dict(k_scale=k_scale, v_scale=v_scale)
    args |= {} if sinks is None else dict(sinks=sinks.astype(jnp.float32) * LOG2_E)
    kernel = plgpu.kernel(
        functools.partial(_kernel, s, tuple(args)),
        out_type=(), scratch_types=_scratch(s, dtype, k),
        grid=(config.num_ctas,), grid_names=("cta",),
        num_threads=config.warpgroups + 1, thread_name="wg",
        compiler_params=replace(COMPILER, unsafe_no_auto_barriers=k_scale is not None),
    )  # fmt: skip
    out = jax.empty_ref(jax.ShapeDtypeStruct((q.shape[0], K, H // K, D), dtype))
    kernel(*args.values(), out)
    return out


def _scratch(s: _Static, dtype: DTypeLike, cache: Array) -> dict[str, Any]:
    """Returns what a block of the grid allocates."""
    D, S, config = s.q[2], s.k[2], s.config
    lanes = 64 if D % 64 == 0 else 32 if D % 32 == 0 else 16
    layout = mosaic.tiled(lanes, 2)
    rows = plgpu.SMEM((config.warpgroups, ROWS, D), dtype, transforms=layout)
    kv = plgpu.SMEM((config.stages, s.keys, D), dtype, transforms=layout)
    scaled = cache.dtype in quantized_kv.DTYPES
    copies = 1 if scaled else max(1, s.keys // S)
    full = plgpu.Barrier(num_arrivals=copies, num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=config.warpgroups, num_barriers=config.stages)
    each = plgpu.Barrier(num_barriers=config.warpgroups)
    barriers = dict(k_full=full, v_full=full, k_free=free, v_free=free)
    barriers |= dict(q_full=each, q_free=each, turn=each)
    if scaled:
        barriers |= prefill_quantized_kv.scratch(cache, s.keys)
    return dict(q_smem=rows, k_smem=kv, v_smem=kv, o_smem=None if s.shared else rows, **barriers)


def _kernel(s: _Static, names: tuple[str, ...], *refs: Ref, **smem: Any) -> None:
    """Takes every `num_ctas`-th (tile, head), there and back again, so that all cost the same."""
    *given, out = refs
    inputs = dict(zip(names, given, strict=True))
    table, sinks = inputs["table"], inputs.get("sinks")
    wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
    H, ctas, config = s.q[1], s.config.num_ctas, s.config
    registers = config.registers_8bit if "k_scale" in inputs else config.registers
    items = table[table.shape[0] - 1, 0] * H

    def at(r: Array) -> Array:
        return r * ctas + jnp.where(lax.rem(r, 2) == 0, cta, ctas - 1 - cta)

    def item(r: Array) -> tuple[Array, Array]:
        return lax.div(at(r), H), lax.rem(at(r), H)

    rounds = lax.div(items, ctas)
    rounds = rounds + (at(rounds) < items).astype(jnp.int32)

    @pl.when(wg < config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(registers[0], action="increase")
        mosaic.barrier_arrive(smem["q_free"].at[wg])
        for slot in range(config.stages):
            mosaic.barrier_arrive(smem["k_free"].at[slot])
            mosaic.barrier_arrive(smem["v_free"].at[slot])
        # The last warpgroup gives the first one its first turn.
        pl.when(wg == config.warpgroups - 1)(lambda: mosaic.barrier_arrive(smem["turn"].at[0]))

        def attend(r: Array, step: Array) -> Array:
            return _attend(s, *item(r), step, wg, table, sinks, out, smem)

        lax.fori_loop(0, rounds, attend, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(wg == config.warpgroups)
    def _() -> None:
        plgpu.set_max_registers(registers[1], action="decrease")

        def fetch(r: Array, step: Array) -> Array:
            return _fetch(s, *item(r), step, inputs, smem)

        lax.fori_loop(0, rounds, fetch, jnp.int32(0))


def _fetch(
    s: _Static, tile: Array, h: Array, step: Array, inputs: dict[str, Ref], smem: dict[str, Any]
) -> Array:
    """Copies what (tile, h) needs; `step` counts the steps before it, and so in `_attend`."""
    q, blocks, table = (inputs[name] for name in ("q", "blocks", "table"))
    (N, K, S, _), keys = s.k, s.keys
    row, first, start, num = (table[tile, column] for column in (0, 1, 5, 7))
    kv_head = lax.div(h, s.q[1] // K)
    copies, part = max(1, keys // S), min(keys, S)

    def queries() -> None:
        for wg in range(s.config.warpgroups):
            mosaic.barrier_wait(smem["q_free"].at[wg])
            rows = pl.ds(first + wg * ROWS, ROWS)
            mosaic.copy_gmem_to_smem(q.at[rows, h], smem["q_smem"].at[wg], smem["q_full"].at[wg])

    def places(j: Index) -> list[tuple[Array, Array, Any]]:
        token = (start + num - 1 - j) * keys
        offset = lax.rem(token, S) if S > keys else 0
        # Entries behind the row's end may be anything, so both indices are clamped.
        columns = [jnp.minimum(lax.div(token, S) + c, blocks.shape[1] - 1) for c in range(copies)]
        ids = [jnp.clip(blocks[row, column], 0, N - 1) for column in columns]
        return [(block, kv_head, pl.ds(offset, part)) for block in ids]

    def body(j: Array, _: None) -> None:
        slot, parts = lax.rem(step + j, s.config.stages), places(j)
        for name in ("k", "v"):
            mosaic.barrier_wait(smem[name + "_free"].at[slot])
            for c, place in enumerate(parts):
                target = smem[name + "_smem"].at[slot, pl.ds(c * part, part)]
                full = smem[name + "_full"].at[slot]
                mosaic.copy_gmem_to_smem(inputs[name].at[place], target, full)
        return _

    if "k_scale" in inputs:
        caches = {name: (inputs[name], inputs[name + "_scale"]) for name in ("k", "v")}
        prefill_quantized_kv.fill(caches, queries, places, (step, num, kv_head), smem)
    else:
        queries()
        lax.fori_loop(0, num, body, None)
    return step + num


def _attend(
    s: _Static, tile: Array, h: Array, step: Array, wg: Array, table: Ref, sinks: Ref | None,
    out: Ref, smem: dict[str, Any],
) -> Array:  # fmt: skip
    """Computes the warpgroup's 64 tokens of (tile, h), from the last step of keys to the first."""
    low, high, zero, start, num = (table[tile, column] for column in (2, 3, 4, 5, 7))
    first = table[tile, 1] + wg * ROWS
    top, keys, stages = start + num - 1, s.keys, s.config.stages
    q_smem, k_smem, v_smem = smem["q_smem"].at[wg], smem["k_smem"], smem["v_smem"]
    mosaic.barrier_wait(smem["q_full"].at[wg])

    def begin(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, p = carry
        at = lax.rem(step, stages)
        mosaic.barrier_wait(smem["k_full"].at[at])

        product = pl.run_state(lambda ref: mosaic.wgmma(ref, q_smem, k_smem.at[at].T))
        scores = product(mosaic.ACC.init(full((ROWS, keys), 0.0)))
        mosaic.barrier_arrive(smem["k_free"].at[at])
        weights, best, total, _ = _softmax(s, scores, best, total, first + zero - top * keys)
        mosaic.barrier_wait(smem["v_full"].at[at])
        _silence(v_smem.at[at], table[tile, 6] - top * keys)
        return best, total, weights.astype(p.dtype)

    def body(j: Array, carry: tuple[Array, ...], masked: bool) -> tuple[Array, ...]:
        acc, best, total, p = carry
        at, last = lax.rem(step + j, stages), lax.rem(step + j - 1, stages)
        mosaic.barrier_wait(smem["k_full"].at[at])
        mosaic.barrier_wait(smem["turn"].at[wg])

        def products(refs: tuple[Ref, ...]) -> None:
            scores_ref, acc_ref, *result_refs = refs
            mosaic.wgmma(scores_ref, q_smem, k_smem.at[at].T)
            mosaic.wgmma(acc_ref, p, v_smem.at[last])
            mosaic.barrier_arrive(smem["turn"].at[lax.rem(wg + 1, s.config.warpgroups)])
            scores = mosaic.wgmma_accumulator_load(scores_ref, wait_n=1)
            mosaic.barrier_arrive(smem["k_free"].at[at])
            ahead = first + zero - (top - j) * keys if masked else None
            results = _softmax(s, scores, best, total, ahead)
            for ref, result in zip(result_refs, results, strict=True):
                ref[...] = result

        zeros = full((ROWS, keys), 0.0)
        _, acc, weights, best, total, kept = pl.run_state(products)(
            (mosaic.ACC.init(zeros), mosaic.ACC.init(acc), zeros, best, total, total)
        )
        # The registers of `p` are free only now that the product which reads them is done.
        p = lax.optimization_barrier(weights).astype(p.dtype)
        mosaic.barrier_arrive(smem["v_free"].at[last])
        mosaic.barrier_wait(smem["v_full"].at[at])
        return acc * lax.broadcast_in_dim(kept, acc.shape, [0]), best, total, p

    def end(_: Array, acc: Array) -> Array:
        last = lax.rem(step + num - 1, stages)
        acc = pl.run_state(lambda ref: mosaic.wgmma(ref, p, v_smem.at[last]))(mosaic.ACC.init(acc))
        mosaic.barrier_arrive(smem["v_free"].at[last])
        return acc

    # Loops of at most one turn stand for conditions: a tile may have no step.
    some = jnp.minimum(num, 1)
    acc, p = full((ROWS, s.q[2]), 0.0), full((ROWS, keys), 0.0).astype(out.dtype)
    best, total = (full((ROWS,), value, PER_ROW) for value in (NOTHING, 0.0))
    best, total, p = lax.fori_loop(0, some, begin, (best, total, p))
    # The steps from `a` to `b` need no mask.
    a = lax.div(jnp.maximum(jnp.maximum(first, low) + zero + 1, 0), keys)
    a, b = jnp.clip(top + 1 - a, some, num), num
    if s.window is not None:
        b = jnp.maximum(jnp.minimum(first + ROWS, high) + zero - s.window, 0)
        b = jnp.clip(top + 1 - lax.div(b + keys - 1, keys), a, num)
    masked, free = (functools.partial(body, masked=x) for x in (True, False))
    carry = lax.fori_loop(some, a, masked, (acc, best, total, p))
    carry = lax.fori_loop(a, b, free, carry)
    if s.window is not None:
        carry = lax.fori_loop(b, num, masked, carry)
    acc, best, total, p = carry
    if not s.shared:
        mosaic.barrier_arrive(smem["q_free"].at[wg])
    acc = lax.fori_loop(0, some, end, acc)
    if sinks is not None:
        total = total + jnp.exp2(sinks[h] - best)
    acc = acc * lax.broadcast_in_dim(s.behind / jnp.maximum(total, 1e-30), acc.shape, [0])
    place = smem["q_smem" if s.shared else "o_smem"].at[wg]
    group = s.q[1] // s.k[1]
    mine = out.at[:, lax.div(h, group), lax.rem(h, group)]
    put_tokens(acc.astype(out.dtype), mine, place, first, low, high)
    if s.shared:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.barrier_arrive(smem["q_free"].at[wg])
    return step + num


def _softmax(
    s: _Static, scores: Array, best: Array, total: Array, ahead: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Takes scores, [64, keys], into the largest and the sum of the weights, [64], in base 2.

    `ahead` is how far the first query's position is ahead of the first key's, None if all see all.
    Returns the weights, the largest, the sum, and what is kept of older weights.
    """
    unit = s.scale * LOG2_E
    if s.soft_cap is not None:
        scores, unit = jnp.tanh(scores * (s.scale / s.soft_cap)), s.soft_cap * LOG2_E
    if ahead is not None:
        scores = _mask(s, scores, ahead)
    new_best = jnp.maximum(best, scores.max(axis=1) * unit)
    kept = jnp.exp2(best - new_best)
    weights = jnp.exp2(scores * unit - lax.broadcast_in_dim(new_best, scores.shape, [0]))
    total = total * kept + weights.sum(axis=1)
    return lax.optimization_barrier((weights, new_best, total, kept))


def _mask(s: _Static, scores: Array, ahead: Array) -> Array:
    """Hides keys that are behind the query, or out of its window."""
    column, row = (plgpu.broadcasted_iota(jnp.int32, (ROWS, 8), i, layout=LAYOUT) for i in (1, 0))
    # Eight columns at a time, and behind a barrier: else the compiler computes all indices ahead of
    # the loops and runs out of registers.
    apart = lax.optimization_barrier(column - row)
    parts = []
    for start in range(0, s.keys, 8):
        seen = apart <= ahead - start
        if s.window is not None:
            seen = seen & (apart > ahead - s.window - start)
        part = lax.slice(scores, (0, start), (ROWS, start + 8))
        parts.append(jnp.where(seen, part, -jnp.inf))
    return lax.concatenate(parts, 1)


def _silence(v: Ref, limit: Array) -> None:
    """Zeroes the values from row `limit` on, [keys, D]: a weight of 0 does not silence a NaN."""

    @pl.when(limit < v.shape[0])
    def _() -> None:
        # Every warpgroup does so: what they write over each other is the same.
        for start in range(0, v.shape[0], ROWS):
            part = v.at[pl.ds(start, ROWS)]
            values = plgpu.layout_cast(part[...], LAYOUT)
            row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=LAYOUT)
            part[...] = jnp.where(row < limit - start, values, jnp.zeros((), values.dtype))
        plgpu.commit_smem()
