"""Bamba: Llama whose attention is a Mamba-2 mixer in most layers, half of each head turned.

https://huggingface.co/blog/bamba
"""

from dataclasses import dataclass
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Model, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.hybrids.hybrid import Hybrid, Params, renamed
from jaxrunner.models.hybrids.mamba2 import Mixer, MixerConfig, mixer_sources, read_mixer
from jaxrunner.models.llama import Layer, Turn, mlp_sources
from jaxrunner.models.partial_rotary import reordered_heads
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.types import Array

NAMES = {
    "post_attention_layernorm": "pre_ff_layernorm", ".mlp.": ".feed_forward.",
    "model.norm": "model.final_layernorm",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BambaConfig(Hybrid, DecoderConfig):
    """A decoder, and the mixers in place of attention."""

    mixer: MixerConfig

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        of_layer = tuple({"class": Layer if attends else MambaLayer} for attends in self.attends)
        return super().dims | self.mixer.dims | dict(Y=of_layer)


@pytree
class MambaLayer(Mixer):
    """Weights of a layer with a mixer."""

    attn_norm: Array = leaf("E", "param")
    mlp_norm: Array = leaf("E", "param")
    gate_up: Linear = nested(outputs="gate_up F", inputs="E", bias="mlp_bias")
    down: Linear = nested(outputs="E", inputs="F", bias="mlp_bias")

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what the mixer adds to the residual, given h, [T, E]; and the cache."""
        return self.mix(config, ops, h, cache, spec.group)

    def feed_forward(self, config: Any, ops: Ops, h: Array) -> tuple[Array, dict[str, Array]]:
        """Returns what the MLP adds to the residual, given h, [T, E]; and no extras."""
        return ops.mlp(h, self.gate_up, self.down), {}


def read(settings: Settings) -> BambaConfig:
    """Reads a Bamba config."""
    settings = settings.with_defaults(rms_norm_eps=1e-5)
    mixer, num = read_mixer(settings), settings.size("num_hidden_layers")
    full = settings.each("attn_layer_indices", int, [])
    settings.ignore("num_logits_to_keep", "z_loss_coefficient", "layer_types", "layers_block_type")
    bias, mlp_bias = (settings.take(f"{of}_bias", bool, False) for of in ("attention", "mlp"))
    own: dict[str, Any] = dict(
        attends=tuple(i in full for i in range(num)), state=mixer.state, mixer=mixer
    )
    biases = dict(qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return BambaConfig(**vars(llama.read_decoder(settings, partial_rotary=0.5, **biases)) | own)


def sources(config: BambaConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    c, E = config, config.hidden_size
    prefixes = [f"model.layers.{i}." for i in range(c.num_hidden_layers)]
    layers = tuple(
        reordered_heads(llama.layer_sources(c, prefix, E), c) if attends else _mamba(c, prefix)
        for prefix, attends in zip(prefixes, c.attends, strict=True)
    )
    return renamed(host_value(Params, **llama.outer_sources(c), layers=layers), NAMES)


def _mamba(c: BambaConfig, prefix: str) -> MambaLayer:
    E, norms = c.hidden_size, dict(attn_norm="input", mlp_norm="post_attention")
    return host_value(
        MambaLayer,
        **{field: Source.whole(f"{prefix}{n}_layernorm.weight", E) for field, n in norms.items()},
        **mixer_sources(c.mixer, f"{prefix}mamba.", E),
        **mlp_sources(f"{prefix}mlp.", c.intermediate_size, E, bias=c.mlp_bias),
    )


bamba = Model(read, Params, llama.embed, llama.layers, llama.logits, sources)
