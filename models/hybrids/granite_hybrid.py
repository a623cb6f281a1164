"""Granite 4: Mamba-2 in most layers, attention in the others, experts beside an MLP of all tokens.

Dense ones have the MLP alone. Scalars are those of Granite 3.
"""

from dataclasses import dataclass
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.model import AttentionSpec, Model, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.hybrids.hybrid import FULL, Hybrid, Mixing, Params, layered, read_attends
from jaxrunner.models.hybrids.mamba2 import Mixer, MixerConfig, mixer_sources, read_mixer
from jaxrunner.models.llama import Turn, attention_sources
from jaxrunner.models.mixtures import granite_moe
from jaxrunner.models.mixtures.granite_moe import (
    GraniteMoeConfig,
    GraniteMoeLayer,
    ScaledFeedForward,
    granite_experts,
    read_multipliers,
)
from jaxrunner.models.mixtures.mixture import OF_EXPERTS, read_mixture, read_router
from jaxrunner.models.rope import no_rope
from jaxrunner.models.sources import linear_source
from jaxrunner.ops.routing import RouterConfig
from jaxrunner.pytree import host_value, pytree
from jaxrunner.types import Array

OF_ATTENTION = "qkv", "q_norm", "k_norm", "o"
KINDS = {"mamba": "linear_attention", "attention": FULL}  # as older files name them


@dataclass(frozen=True, kw_only=True)
class GraniteHybridConfig(Hybrid, GraniteMoeConfig):
    """A mixture, and the mixers in place of attention."""

    mixer: MixerConfig

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        dims = super().dims
        layers = self.of_layers(GraniteMambaLayer, GraniteMoeLayer, dims["Y"])
        return dims | self.mixer.dims | layers


@pytree
class GraniteMambaLayer(ScaledFeedForward, Mixer, Mixing):
    """Weights of a layer with a mixer, whose residuals are scaled."""

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what the mixer adds to the residual, given h, [T, E]; and the cache."""
        residual, cache = super().attend(config, ops, h, turn, cache, spec)
        return residual * config.residual_multiplier, cache


def read(settings: Settings) -> GraniteHybridConfig:
    """Reads a Granite 4 config.

    Raises:
      ValueError: a setting that is not supported; names it.
    """
    mixer, num = read_mixer(settings), settings.size("num_hidden_layers")
    named = settings.each("layer_types", str, ["mamba"] * num)
    settings = settings.with_value("layer_types", [KINDS.get(name, name) for name in named])
    bias = settings.take("attention_bias", bool, False)
    units = settings.size("shared_intermediate_size", 1024)
    own: dict[str, Any] = dict(
        attends=read_attends(settings, (), "linear_attention"), state=mixer.state, mixer=mixer,
        qkv_bias=bias, o_bias=bias, **read_multipliers(settings),
    )  # fmt: skip
    positions = settings.take("position_embedding_type", str, "nope")
    if positions not in ("nope", "rope"):
        raise ValueError(f"position_embedding_type must be 'nope' or 'rope', got {positions!r}")
    settings.ignore("init_method", "normalization_function")
    if settings.size("num_local_experts", 8, least=0):
        router = read_router(settings, "num_local_experts", scoring="softmax_of_chosen")
        own |= dict(shared_expert_intermediate_size=units)
    else:
        settings.ignore("num_experts_per_tok")
        router = RouterConfig(1, 1)  # that no layer has
        own |= dict(sparse=(False,) * num, intermediate_size=units)
    if positions == "nope":
        heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
        own |= dict(rope=no_rope(settings.size("head_dim", hidden // heads)))
    return read_mixture(
        settings, router, units="intermediate_size", kind=GraniteHybridConfig, **own
    )


def sources(config: GraniteHybridConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    return layered(config, _layer)


def _layer(c: GraniteHybridConfig, prefix: str, attends: bool) -> Any:
    E, sparse = c.hidden_size, any(c.sparse)
    found: dict[str, Any] = dict.fromkeys(("gate_up", "down", *OF_EXPERTS))
    found |= attention_sources(c, prefix, E)
    if not attends:
        found = {name: found[name] for name in found if name not in OF_ATTENTION}
        found |= mixer_sources(c.mixer, f"{prefix}mamba.", E)
    F = c.shared_expert_intermediate_size if sparse else c.intermediate_size
    at, name = f"{prefix}shared_mlp.", "shared_" if sparse else ""
    gate_up = Source.whole(f"{at}input_linear.weight", 2 * F, E, held=(2, F, E))
    down = Source.whole(f"{at}output_linear.weight", E, F)
    found |= {f"{name}gate_up": linear_source(gate_up), f"{name}down": linear_source(down)}
    if sparse:
        found |= granite_experts(c, prefix)
    return host_value(GraniteMoeLayer if attends else GraniteMambaLayer, **found)


granite_hybrid = Model(
    read, Params, llama.scaled_embed, llama.layers, granite_moe.logits, sources,
    tensor_parallel=True,
)  # fmt: skip
