"""A layer's operations by kernels: the fused ones where they serve the shapes, else plain steps."""

from dataclasses import replace
from typing import Any

from jaxrunner.kernels_pallas import paged_attention
from jaxrunner.kernels_pallas.add_norm import add_rms_norm
from jaxrunner.kernels_pallas.rope_write import rope_write
from jaxrunner.model import AttentionSpec, Heads, Ops
from jaxrunner.types import Array, Batch


def ops(batch: Batch) -> Ops:
    """Returns what a layer runs on the paged cache of `batch`."""

    def attend(qkv: Array, heads: Heads, cache: Any, spec: AttentionSpec):
        at = batch.cache_index[spec.group]
        cos, sin, q_norm, k_norm, eps = heads
        q, k, v = rope_write(qkv, cos, sin, cache.k, cache.v, at, q_norm, k_norm, eps=eps)
        cache = replace(cache, k=k, v=v)
        return paged_attention.attend(batch, q, cache, spec), cache

    def add_norm(x: Array, residual: Array, weight: Array, eps: float):
        return add_rms_norm(x, residual, weight, eps=eps)

    return Ops(attend, add_norm)
