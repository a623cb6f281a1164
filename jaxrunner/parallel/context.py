"""Decode context parallelism: devices share out the tokens of a KV head in place of copying it.

With tensor_parallel_size=N, N / K devices read each KV head. In groups of C neighbours each device
keeps the keys and values of every C-th token. The group's devices exchange their queries, attend to
their own tokens, and merge the results, as Flash-Decoding merges split rows. Latents, of which each
device would have a copy, are shared out in the same way.
"""

from collections.abc import Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.interleave import Interleave, Part, interleave_of
from jaxrunner.caches.latent import LatentCache
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.attention import decode_attention, latent_reference
from jaxrunner.linear import per_head
from jaxrunner.mixtures.recorded_routes import RoutesCache
from jaxrunner.model import AttentionSpec, MakeOps, Ops, RopeAndNorm
from jaxrunner.operation import Note, Operation, run_first, unnoted
from jaxrunner.ops import cpu_attention
from jaxrunner.ops.backends import Choice
from jaxrunner.ops.latent import attention as latent_attention
from jaxrunner.ops.plain import split_heads
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.speculators.drafter import DrafterConfig
from jaxrunner.types import Array, Batch, LayerCache

DEALT_OUT = LayerCache, LatentCache
WHOLE = (RoutesCache,)  # kinds that each device has of all tokens, as it computes with all
MOST_QUERIES = 8  # of a row in the kernel, which reads its keys anew for each


def check_context(config: ModelConfig | DrafterConfig, num: int, interleave: Interleave) -> None:
    """Checks that `num` devices of a model can form groups that share a KV head.

    Raises:
      ValueError: they cannot; names the sizes of groups that they can form.
    """
    parts, size = interleave
    is_latent = any(kind.leaves is LatentCache for kind in config.cache_kinds)
    K = 1 if is_latent else config.dims["K"]
    what = "latents" if is_latent else f"num_key_value_heads={K}"

    def fits(n: int) -> bool:
        return n == 1 or (num % n == 0 and num // n % K == 0)

    if not fits(parts):
        good = ", ".join(str(n) for n in range(1, num + 1) if fits(n))
        raise ValueError(
            f"decode_context_parallel_size={parts} must divide tensor_parallel_size={num} into "
            f"a multiple of {config.architecture}'s {what}: take one of {good}"
        )
    if parts == 1 and size != 1:
        raise ValueError(
            f"cp_kv_cache_interleave_size={size} is of tokens that are dealt out to devices: "
            "leave it out, or set decode_context_parallel_size over 1"
        )


def deal_out(choice: Choice, config: ModelConfig, engine: EngineConfig) -> Choice:
    """Returns the layer operations of an engine whose config shares out tokens.

    Raises:
      ValueError: the block size is no multiple of the interleave, or a layer keeps no KV blocks.
    """
    parts, size = interleave = interleave_of(config)
    if parts == 1:
        return choice
    goes = (*DEALT_OUT, *WHOLE)
    others = [type(kind).__name__ for kind in config.cache_kinds if kind.leaves not in goes]
    if others:
        raise ValueError(
            f"decode_context_parallel_size={parts} deals out keys and values, "
            f"{config.architecture} has {others[0]}: leave it out"
        )
    if engine.block_size % size:
        raise ValueError(
            f"cp_kv_cache_interleave_size={size} must divide block_size={engine.block_size}: "
            "change one of them"
        )
    reason = f"{choice.reason}; each device attends to a part of each request's tokens"
    ops = functools.partial(context_ops, choice.ops, interleave)
    return choice._replace(ops=ops, reason=reason)


def context_ops(
    make: MakeOps, interleave: Interleave, batch: Batch, *, note: Note = unnoted
) -> Ops:
    """Makes the operations of layers whose keys and values several devices share out."""

    def of_all(
        operations: Sequence[Operation], own: Batch, q: Array, cache: Any, spec: AttentionSpec,
        part: Part,
    ) -> Array:  # fmt: skip
        queries, whole = _gather_heads(q, interleave.parts), spec._replace(sinks=None)
        found = run_first("attention", operations, own, queries, cache, whole, part, note=note)
        found = _own_heads(found, interleave.parts)
        if spec.sinks is not None:  # one more part, which gives nothing
            sinks = jnp.zeros_like(found[:1]).at[..., -1].set(spec.sinks.astype(found.dtype))
            found = jnp.concatenate([found, sinks])
        return merge(found).astype(q.dtype)

    def attend(
        q: Array, k: Array, v: Array, cache: LayerCache, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        part, own = own_part(interleave, batch, (cache.k.shape[0], cache.k.shape[2]))
        cache = reference.write_kv(own, k, v, cache, spec.group)
        return of_all(ATTENTION, own, q, cache, spec, part), cache

    def attend_latent(
        q: Array, latents: Array, up: Any, cache: LatentCache, spec: AttentionSpec,
        *, per_head: latent_attention.PerHead = per_head,
    ) -> tuple[Array, LatentCache]:  # fmt: skip
        N, S, _ = cache.latents.shape
        part, own = own_part(interleave, batch, (N, S))
        cache = latent_reference.write_latents(own, latents, cache, spec.group)

        def of_parts(q: Array) -> Array:
            return of_all(latent_attention.PLAIN, own, q, cache, spec, part)

        return latent_attention.absorbed(of_parts, per_head, q, latents, up, spec), cache

    def rotate_attend(
        qkv: Array, heads: RopeAndNorm, cache: LayerCache, spec: AttentionSpec
    ) -> tuple[Array, LayerCache]:
        return attend(*split_heads(qkv, heads), cache, spec)

    return replace(
        make(batch, note=note), attend=attend, rotate_attend=rotate_attend,
        attend_latent=attend_latent,
    )  # fmt: skip


def own_part(
    interleave: Interleave, batch: Batch, cache_shape: tuple[int, int]
) -> tuple[Part, Batch]:
    """Returns this device's part of the tokens, and the batch with its cache indices.

    cache_shape: (N, S) of the device's own cache.
    """
    part = Part(*interleave, jax.lax.axis_index(TENSOR) % interleave.parts)
    index = tuple(part.cache_index(index, cache_shape) for index in batch.cache_index)
    return part, replace(batch, cache_index=index)


def merge(parts: Array) -> Array:
    """Merges the attention over C parts of the keys, [C, ..., D + 1], into that over all, [..., D].

    The last column is the log of the softmax's sum, from `reference.online_softmax`. Tokens that
    saw no key get zeros.
    """
    found, weight = parts[..., :-1], parts[..., -1:]
    best = weight.max(0, keepdims=True)
    weight = jnp.exp(weight - jnp.where(best == -jnp.inf, 0.0, best))
    total = weight.sum(0)
    return (found * weight).sum(0) / jnp.where(total == 0, 1.0, total)


def _gather_heads(q: Array, parts: int) -> Array:
    """Returns the queries, [T, C * H, D], of a device's group, given its own, [T, H, D]."""
    return jax.lax.all_gather(q, TENSOR, axis_index_groups=_groups(parts), axis=1, tiled=True)


def _own_heads(found: Array, parts: int) -> Array:
    """Returns what each device of the group found for this one's heads, [C, T, H, D].

    found: what this one found for the heads of all, [T, C * H, D].
    """
    T, H, D = found.shape
    split = found.reshape(T, parts, H // parts, D)
    return jax.lax.all_to_all(split, TENSOR, 1, 0, axis_index_groups=_groups(parts))


def _groups(parts: int) -> list[list[int]]:
    num = jax.lax.axis_size(TENSOR)
    return [[*range(i, i + parts)] for i in range(0, num, parts)]


def _decode(batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec, part: Part) -> Array:
    """Runs each token as a row of its own, whose keys are those of this part that it sees."""
    B, Q, positions = batch.seq_lens.shape[0], batch.query_len, batch.inputs.positions
    seen = part.num_local(jnp.where(batch.row < B, positions + 1, 0))
    blocks = jnp.repeat(batch.blocks[spec.group], Q, axis=0, total_repeat_length=B * Q)
    return decode_attention.decode_attention(
        q, cache.k, cache.v, blocks, seen, scale=spec.scale, weighed=True
    )


def _refuses_decode(
    batch: Batch, q: Array, cache: LayerCache, spec: AttentionSpec, part: Part
) -> str | None:
    if jax.default_backend() == "cpu":
        return "is for GPUs"
    if not 0 < batch.query_len <= MOST_QUERIES:
        return f"wants as many tokens of every row, {MOST_QUERIES} at most"
    if spec.window is not None or spec.chunk_size is not None or spec.soft_cap is not None:
        return "wants no window, chunks or cap of scores"
    if cache.k_scale is not None:
        return "wants a cache without scales"
    return decode_attention.refuses(q, cache.k)


# (batch, q [T, H, D], cache, spec, part) -> as `reference.attend` of a part, [T, H, D + 1].
ATTENTION = (
    Operation("decode_attention", _decode, _refuses_decode),
    Operation("plain JAX, by tiles", cpu_attention.attend, cpu_attention.refuses),
    Operation("plain JAX", reference.attend),
)
