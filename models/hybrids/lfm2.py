"""LFM2: gated convolutions of a few tokens in most layers, attention in the others.

https://www.liquid.ai/blog/liquid-foundation-models-v2-our-second-series-of-generative-ai-models
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrunner.caches.state import RecurrentState
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Model, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.hybrids.hybrid import FULL, Hybrid, Normed, Params, layered, read_attends
from jaxrunner.models.llama import Layer, Mlp, Turn
from jaxrunner.models.sources import conv_source, linear_source, mlp_sources, norm_sources, renamed
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.types import Array

CONV = "conv"
NAMES = {
    "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "model.norm": "model.embedding_norm",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(Hybrid, DecoderConfig):
    """A decoder, and the convolutions in place of attention."""

    conv_bias: bool

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        own = dict(gates=3, conv_width=self.state.taps + 1, conv_bias=self.conv_bias)
        own |= dict.fromkeys(("mix_groups", "inner"), self.hidden_size)
        return super().dims | own | self.of_layers(ConvLayer, Layer)


@pytree
class ConvLayer(Mlp, Normed):
    """Weights of a layer with a convolution: `conv_in` makes two gates and what they gate."""

    conv_in: Linear = nested(outputs="gates mix_groups", inputs="E", bias="conv_bias")
    conv_weight: Array = leaf("mix_groups conv_width", "param")
    conv_offset: Array | None = leaf("mix_groups", "param", when="conv_bias")
    conv_out: Linear = nested(outputs="E", inputs="inner", bias="conv_bias")

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what the convolution adds to the residual, given h, [T, E]; and the cache."""
        before, behind, x = jnp.moveaxis(ops.linear(h, self.conv_in), 1, 0)
        args = self.conv_weight, self.conv_offset, cache, spec.group
        y, cache = ops.convolve(before * x, *args)
        return ops.project(behind * y, self.conv_out), cache


def read(settings: Settings) -> Lfm2Config:
    """Reads an LFM2 config."""
    names = dict(norm_eps="rms_norm_eps", block_ff_dim="intermediate_size")
    settings = settings.renamed(**names, tie_embedding="tie_word_embeddings")
    usual = dict(tie_word_embeddings=True, rms_norm_eps=1e-5)
    if "rope_parameters" not in settings:
        usual |= dict(rope_theta=1e6)
    settings = settings.with_defaults(**usual)
    hidden, num = settings.size("hidden_size"), settings.size("num_hidden_layers")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        settings.expect(key, hidden)
    settings.expect("block_norm_eps", settings.take("rms_norm_eps", float))
    settings.expect("num_heads", settings.size("num_attention_heads"))
    settings.expect("block_use_swiglu", True)
    settings.expect("use_pos_enc", True)
    settings.ignore("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init",
                    "conv_use_xavier_init")  # fmt: skip
    full = settings.each("full_attn_idxs", int, [*range(num)])
    default = [FULL if i in full else CONV for i in range(num)]
    taps, conv_bias = settings.size("conv_L_cache", 3) - 1, settings.take("conv_bias", bool, False)
    own: dict[str, Any] = dict(
        attends=read_attends(settings, default, CONV),
        state=RecurrentState(taps=taps, channels=hidden),
        intermediate_size=_read_units(settings),
        conv_bias=conv_bias,
    )
    decoder = read_decoder(settings, qk_norm=True)
    return Lfm2Config(**vars(decoder) | own)


def _read_units(settings: Settings) -> int:
    """Returns the width of MLPs, which most configs give before it is adjusted."""
    units = settings.size("intermediate_size")
    adjusts = settings.take("block_auto_adjust_ff_dim", bool, True)
    times = settings.take("block_ffn_dim_multiplier", float, 1.0)
    multiple = settings.size("block_multiple_of", 256)
    if not adjusts:
        return units
    units = int(times * int(2 * units / 3))
    return -(-units // multiple) * multiple


def sources(config: Lfm2Config) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    return renamed(layered(config, _layer), NAMES)


def _layer(c: Lfm2Config, prefix: str, attends: bool) -> Layer | ConvLayer:
    E, at = c.hidden_size, f"{prefix}conv."
    if attends:
        return llama.layer_sources(c, prefix, E)

    def product(name: str, parts: int) -> Linear:
        held = (parts, E) if parts > 1 else (E,)
        bias = Source.whole(f"{at}{name}.bias", parts * E, held=held) if c.conv_bias else None
        weight = Source.whole(f"{at}{name}.weight", parts * E, E, held=(*held, E))
        return linear_source(weight, bias)

    return host_value(
        ConvLayer,
        **norm_sources(prefix, E),
        conv_in=product("in_proj", 3),
        conv_weight=conv_source(f"{at}conv", E, c.state.taps + 1),
        conv_offset=Source.whole(f"{at}conv.bias", E) if c.conv_bias else None,
        conv_out=product("out_proj", 1),
        **mlp_sources(f"{prefix}mlp.", c.intermediate_size, E),
    )


lfm2 = Model(read, Params, llama.embed, llama.layers, llama.logits, sources, tensor_parallel=True)
