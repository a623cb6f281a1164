"""Qwen3-Next: gated delta nets in three layers of four, gated attention in the others, experts.

Norms are by 1 + w, that of the delta nets but. https://qwenlm.github.io/blog/qwen3_next
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Model, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.hybrids.delta_net import DeltaNet, DeltaNetConfig, read_delta_net
from jaxrunner.models.hybrids.hybrid import FULL, Hybrid, Mixing, Normed, Params, read_attends
from jaxrunner.models.llama import Turn
from jaxrunner.models.mixtures.mixture import (
    OF_EXPERTS,
    FeedForward,
    MixtureConfig,
    qwen_experts,
    read_mixture,
    read_router,
)
from jaxrunner.models.mixtures.qwen3_moe import read_sparse
from jaxrunner.models.partial_rotary import held_dims
from jaxrunner.models.sources import (
    by_groups,
    conv_source,
    joined_source,
    linear_source,
    mlp_sources,
    norm_sources,
    packed_source,
    product_source,
)
from jaxrunner.ops.plain import rms_norm_of_one_more, rotate
from jaxrunner.ops.routing import RouterConfig
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.types import Array, Inputs

LINEAR = "linear_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Hybrid, MixtureConfig):
    """A mixture, and the gated delta nets in place of attention."""

    mixer: DeltaNetConfig

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        dims = super().dims
        layers = self.of_layers(DeltaNetLayer, GatedAttentionLayer, dims["Y"])
        return dims | self.mixer.dims | layers | dict(query_and_gate=2, key_and_value=2)


@pytree
class DeltaNetLayer(FeedForward, DeltaNet, Mixing):
    """Weights of a layer with a gated delta net."""


@pytree
class GatedAttentionLayer(FeedForward, Normed):
    """Weights of a layer whose attention is gated by what its queries come with."""

    q: Linear = nested(outputs="query_and_gate H D", inputs="E", bias="qkv_bias")
    kv: Linear = nested(outputs="K key_and_value D", inputs="E", bias="qkv_bias")
    q_norm: Array = leaf("D", "param")
    k_norm: Array = leaf("D", "param")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2, bias="o_bias")

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        q, gate = jnp.moveaxis(ops.linear(h, self.q), 1, 0)
        k, v = jnp.moveaxis(ops.linear(h, self.kv), 2, 0)
        q, k = (
            rotate(rms_norm_of_one_more(x, w, config.rms_norm_eps), *turn)
            for x, w in ((q, self.q_norm), (k, self.k_norm))
        )
        out, cache = ops.attend(q, k, v, cache, spec)
        return ops.project(out * jax.nn.sigmoid(gate), self.o), cache


def layers(
    config: Qwen3NextConfig, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs,
    ops: Ops, *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers `first` to `last` as `llama.layers` does, with norms by 1 + w."""
    add_norm = ops.add_norm
    ops = replace(ops, add_norm=lambda *given, **told: add_norm(*given, True, **told))
    return llama.layers(config, params, x, kv, inputs, ops, first=first, last=last, extras=extras)


def read(settings: Settings) -> Qwen3NextConfig:
    """Reads a Qwen3-Next config."""
    renormalised = settings.take("norm_topk_prob", bool, True)
    router = read_router(settings, "num_experts", norm_topk_prob=renormalised)
    return read_next(settings, router, sparse=read_sparse(settings), **read_shared(settings))


def read_shared(settings: Settings) -> dict[str, Any]:
    """Returns what a config says of the MLP beside experts."""
    units = settings.size("shared_expert_intermediate_size", 512)
    return dict(shared_expert_gate=True, shared_expert_intermediate_size=units)


def read_next(settings: Settings, router: RouterConfig, **flags: Any) -> Qwen3NextConfig:
    """Reads what configs of this kind have in common; flags: as `read_mixture` has them."""
    mixer, num = read_delta_net(settings), settings.size("num_hidden_layers")
    every = settings.size("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % every else FULL for i in range(num)]
    bias = settings.take("attention_bias", bool, False)
    own: dict[str, Any] = dict(
        attends=read_attends(settings, default, LINEAR), state=mixer.state, mixer=mixer,
        qkv_bias=bias, o_bias=bias, qk_norm=True,
    )  # fmt: skip
    return read_mixture(
        settings, router, kind=Qwen3NextConfig, head_dim=256, partial_rotary=0.25, **own | flags
    )


def sources(
    config: Qwen3NextConfig, of_products: Callable[..., dict[str, Any]] | None = None
) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint.

    of_products: (config, prefix) -> the sources of `mix_in` and `rates`, by these names.
    """
    c, products = config, of_products or _products
    prefixes = [f"model.layers.{i}." for i in range(c.num_hidden_layers)]
    layers = tuple(
        host_value(
            GatedAttentionLayer if attends else DeltaNetLayer,
            **_outer(c, prefix, sparse),
            **(_attention(c, prefix) if attends else _delta_net(c, prefix, products)),
        )
        for prefix, attends, sparse in zip(prefixes, c.attends, c.sparse, strict=True)
    )
    return host_value(Params, **llama.outer_sources(c), layers=layers)


def _outer(c: Qwen3NextConfig, prefix: str, sparse: bool) -> dict[str, Any]:
    """Returns the sources of a layer's norms and of what is behind its attention."""
    dense = functools.partial(mlp_sources, f"{prefix}mlp.", c.intermediate_size, c.hidden_size)
    own = qwen_experts(c, prefix) if sparse else dense()
    none = dict.fromkeys(("gate_up", "down", *OF_EXPERTS))
    return none | norm_sources(prefix, c.hidden_size) | own


def _attention(c: Qwen3NextConfig, prefix: str) -> dict[str, Any]:
    E, D, at = c.hidden_size, c.head_dim, f"{prefix}self_attn."
    H, K = c.num_attention_heads, c.num_key_value_heads
    dims = held_dims(D, 2 * len(c.rope.inv_freq))

    def queries(arrays: list[np.ndarray]) -> np.ndarray:
        found = arrays[0].reshape(H, 2, D, *arrays[0].shape[1:])
        return np.stack([found[:, 0, dims], found[:, 1]])

    def keys(arrays: list[np.ndarray]) -> np.ndarray:
        k, v = (a.reshape(K, D, *a.shape[1:]) for a in arrays)
        return np.stack([k[:, dims], v], 1)

    def of_head(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0][dims]

    def norm(name: str) -> Source:
        return joined_source((f"{at}{name}.weight",), ((D,),), of_head)

    end = Source.whole(f"{at}o_proj.bias", E) if c.o_bias else None
    return dict(
        q=packed_source({f"{at}q_proj": 2 * H * D}, queries, E, bias=c.qkv_bias),
        kv=packed_source({f"{at}k_proj": K * D, f"{at}v_proj": K * D}, keys, E, bias=c.qkv_bias),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        o=linear_source(
            Source.whole(f"{at}o_proj.weight", E, H * D, held=(E, H, D)), end, num_in=2
        ),
    )


def _delta_net(
    c: Qwen3NextConfig, prefix: str, of_products: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Returns the sources of a `DeltaNet`."""
    m, E, at = c.mixer, c.hidden_size, f"{prefix}linear_attn."
    channels = functools.partial(by_groups, m.key_heads, m.parts[:-1])
    return dict(
        conv_weight=conv_source(f"{at}conv1d", m.channels, m.conv_width, channels),
        step_offset=Source.whole(f"{at}dt_bias", m.value_heads),
        log_rate=Source.whole(f"{at}A_log", m.value_heads),
        mix_norm=Source.whole(f"{at}norm.weight", m.value_dim),
        mix_out=product_source(f"{at}out_proj", E, m.inner),
        **of_products(c, at),
    )


def _products(c: Qwen3NextConfig, at: str) -> dict[str, Any]:
    """Returns the sources of products whose rows lie by groups of heads in a checkpoint."""
    m, E = c.mixer, c.hidden_size

    def mixed(arrays: list[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(m.key_heads, -1, arrays[0].shape[1])

    def rates(arrays: list[np.ndarray]) -> np.ndarray:
        rows = arrays[0].reshape(m.key_heads, 2, -1, arrays[0].shape[1])
        return np.moveaxis(rows, 1, 0).reshape(2, m.value_heads, -1)

    return dict(
        mix_in=packed_source({f"{at}in_proj_qkvz": m.channels + m.inner}, mixed, E),
        rates=packed_source({f"{at}in_proj_ba": 2 * m.value_heads}, rates, E),
    )


qwen3_next = Model(
    read, Params, llama.embed, layers, llama.logits, sources, spare=("mtp.",), tensor_parallel=True
)
