"""OLMoE: experts in all layers, and one norm over the queries of all heads. arXiv:2409.02060."""

from dataclasses import dataclass
import functools
from typing import Any

import jax.numpy as jnp

from jaxrunner.hf_config import Settings
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm, Source
from jaxrunner.models.llama import Turn
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    MixtureLayer,
    Params,
    mixture,
    qwen_experts,
    read_mixture,
    read_router,
    sources,
)
from jaxrunner.ops.plain import unpacked
from jaxrunner.pytree import each, leaf, pytree
from jaxrunner.types import Array


@dataclass(frozen=True, kw_only=True)
class OlmoeConfig(MixtureConfig):
    """A mixture, and how far queries, keys and values may lie from zero."""

    clip_qkv: float | None = None


@pytree
class OlmoeLayer(MixtureLayer):
    """Weights of one layer, whose norms of queries and keys are over all heads."""

    q_norm: Array | None = leaf("all_heads D", "param", when="qk_norm")
    k_norm: Array | None = leaf("all_kv_heads D", "param", when="qk_norm")

    def attend(
        self, config: OlmoeConfig, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        assert self.q_norm is not None and self.k_norm is not None
        qkv, eps = ops.linear(h, self.qkv), config.rms_norm_eps
        q, k, v = unpacked(qkv)
        q, k = ops.norm_heads(q, self.q_norm, eps), ops.norm_heads(k, self.k_norm, eps)
        queries = q.reshape(*qkv.shape[:2], -1, qkv.shape[3])
        qkv = jnp.concatenate([queries, k[:, :, None], v[:, :, None]], 2)
        if (most := config.clip_qkv) is not None:
            qkv = jnp.clip(qkv, -most, most)
        out, cache = ops.rotate_attend(qkv, RopeAndNorm(*turn, None, None, eps), cache, spec)
        return ops.project(out, self.o), cache


@pytree
class OlmoeParams(Params):
    """Weights of the model."""

    layers: tuple[OlmoeLayer, ...] = each("Y")


def read(settings: Settings) -> OlmoeConfig:
    """Reads an OLMoE config."""
    renormalised = settings.take("norm_topk_prob", bool, False)
    router = read_router(settings, "num_experts", norm_topk_prob=renormalised)
    bias, clip = settings.take("attention_bias", bool, False), settings.take("clip_qkv", float, -1)
    flags = dict(qkv_bias=bias, o_bias=bias, qk_norm=True, clip_qkv=None if clip == -1 else clip)
    return read_mixture(settings, router, units="intermediate_size", kind=OlmoeConfig, **flags)


def _own(c: OlmoeConfig, prefix: str) -> dict[str, Any]:
    """Returns the sources of experts and of norms."""

    def norm(name: str, heads: int) -> Source:
        held = heads, c.head_dim
        return Source.whole(f"{prefix}self_attn.{name}.weight", heads * c.head_dim, held=held)

    norms = dict(q_norm=norm("q_norm", c.num_attention_heads),
                 k_norm=norm("k_norm", c.num_key_value_heads))  # fmt: skip
    return qwen_experts(c, prefix) | norms


olmoe = mixture._replace(
    read=read, params=OlmoeParams,
    sources=functools.partial(sources, of_experts=_own, params=OlmoeParams, layer=OlmoeLayer),
)  # fmt: skip
