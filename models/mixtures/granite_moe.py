"""Granite 3 with experts: embeddings, scores, residuals and logits are scaled."""

from dataclasses import dataclass
import functools
from typing import Any

from jaxrunner.config import read_scale
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Experts
from jaxrunner.model import AttentionSpec, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.llama import Turn
from jaxrunner.models.mixtures.mixture import (
    FeedForward,
    MixtureConfig,
    MixtureLayer,
    Params,
    mixture,
    read_mixture,
    read_router,
    router_source,
    sources,
)
from jaxrunner.pytree import each, host_value, pytree
from jaxrunner.types import Array

MULTIPLIERS = (
    "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GraniteMoeConfig(MixtureConfig):
    """A mixture, and its scalars; logits are divided by theirs."""

    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float


@pytree
class ScaledFeedForward(FeedForward):
    """Weights behind the attention of a layer whose residuals are scaled."""

    def feed_forward(
        self, config: GraniteMoeConfig, ops: Ops, h: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Returns what the experts or the MLP add to the residual, given h, [T, E]; and extras."""
        residual, told = super().feed_forward(config, ops, h)
        return residual * config.residual_multiplier, told


@pytree
class GraniteMoeLayer(ScaledFeedForward, MixtureLayer):
    """Weights of one layer, whose residuals are scaled."""

    def attend(
        self, config: GraniteMoeConfig, ops: Ops, h: Array, turn: Turn, cache: Any,
        spec: AttentionSpec,
    ) -> tuple[Array, Any]:  # fmt: skip
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        spec = spec._replace(scale=config.attention_multiplier)
        residual, cache = super().attend(config, ops, h, turn, cache, spec)
        return residual * config.residual_multiplier, cache


@pytree
class GraniteMoeParams(Params):
    """Weights of the model."""

    layers: tuple[GraniteMoeLayer, ...] = each("Y")


def read(settings: Settings) -> GraniteMoeConfig:
    """Reads a Granite-MoE config."""
    router = read_router(settings, "num_local_experts", scoring="softmax_of_chosen")
    bias = settings.take("attention_bias", bool, False)
    flags: dict[str, Any] = dict(qkv_bias=bias, o_bias=bias) | read_multipliers(settings)
    return read_mixture(settings, router, units="intermediate_size", kind=GraniteMoeConfig, **flags)


def read_multipliers(settings: Settings) -> dict[str, float]:
    """Returns the scalars of a config; raises as `read_scale`."""
    return {name: read_scale(settings, name) for name in MULTIPLIERS}


def logits(config: GraniteMoeConfig, params: Any, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V], in its dtype."""
    return llama.logits(config, params, hidden) / config.logits_scaling


def granite_experts(c: MixtureConfig, prefix: str) -> dict[str, Any]:
    """Returns the sources of the experts of a layer whose names begin with `prefix`."""
    at, X = f"{prefix}block_sparse_moe.", c.router.num_experts
    F, E = c.moe_intermediate_size, c.hidden_size
    experts = host_value(
        Experts,
        gate_up=Source.whole(f"{at}input_linear.weight", X, 2 * F, E, held=(X, 2, F, E)),
        down=Source.whole(f"{at}output_linear.weight", X, E, F),
        gate_up_bias=None,
        down_bias=None,
        activation="swiglu",
    )
    return dict(router=router_source(c, f"{at}router.layer"), experts=experts)


granite_moe = mixture._replace(
    read=read, params=GraniteMoeParams, embed=llama.scaled_embed, logits=logits,
    sources=functools.partial(
        sources, of_experts=granite_experts, params=GraniteMoeParams, layer=GraniteMoeLayer
    ),
)  # fmt: skip
