"""Bamba: Llama whose attention is a Mamba-2 mixer in most layers, half of each head turned.

https://huggingface.co/blog/bamba
"""

from dataclasses import dataclass
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.hybrids.hybrid import Hybrid, Mixing, Params, layered
from jaxrunner.models.hybrids.mamba2 import Mixer, MixerConfig, mixer_sources, read_mixer
from jaxrunner.models.llama import Layer, Mlp
from jaxrunner.models.partial_rotary import reordered_heads
from jaxrunner.models.sources import mlp_sources, norm_sources, renamed
from jaxrunner.pytree import host_value, pytree

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
        return super().dims | self.mixer.dims | self.of_layers(MambaLayer, Layer)


@pytree
class MambaLayer(Mlp, Mixer, Mixing):
    """Weights of a layer with a mixer."""


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
    return BambaConfig(**vars(read_decoder(settings, partial_rotary=0.5, **biases)) | own)


def sources(config: BambaConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    return renamed(layered(config, _layer), NAMES)


def _layer(c: BambaConfig, prefix: str, attends: bool) -> Layer | MambaLayer:
    E = c.hidden_size
    if attends:
        return reordered_heads(llama.layer_sources(c, prefix, E), c)
    return host_value(
        MambaLayer,
        **norm_sources(prefix, E),
        **mixer_sources(c.mixer, f"{prefix}mamba.", E),
        **mlp_sources(f"{prefix}mlp.", c.intermediate_size, E, bias=c.mlp_bias),
    )


bamba = Model(read, Params, llama.embed, llama.layers, llama.logits, sources, tensor_parallel=True)
