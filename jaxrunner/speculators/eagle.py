"""EAGLE: one decoder layer over the model's hidden state of a token, and the token that follows it.

arXiv:2401.15077; checkpoints as its authors publish them.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm, Source
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import layer_sources
from jaxrunner.models.rope import rotation
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.speculators.drafter import Drafter, Target, own_or_shared_embed
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class EagleConfig:
    """An EAGLE head: the sizes of its layer, and which ends are its own."""

    decoder: DecoderConfig
    fc_bias: bool
    own_embed: bool
    extras: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        return self.decoder.architecture

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        c = self.decoder
        own = dict(pair=2 * c.hidden_size, own_V=c.vocab_size, own_embed=self.own_embed)
        return c.dims | own | dict(fc_bias=self.fc_bias)

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Keys and values of all tokens."""
        return self.decoder.cache_kinds


@pytree
class Params:
    """Weights of an EAGLE head; there is no norm before attention, and none at the end."""

    embed: Array | None = leaf("own_V E", "param", when="own_embed")
    fc: Linear = nested(outputs="E", inputs="pair", bias="fc_bias")
    qkv: Linear = nested(outputs="K P D", inputs="E", bias="qkv_bias")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2)
    mlp_norm: Array = leaf("E", "param")
    gate_up: Linear = nested(outputs="gate_up F", inputs="E")
    down: Linear = nested(outputs="E", inputs="F")


def read(settings: Settings, target: ModelConfig, tensors: frozenset[str]) -> EagleConfig:
    """Reads the config.json of an EAGLE head for `target`; tensors: names in its files.

    Raises:
      ValueError: it is not for such a model, or has more than a layer.
    """
    fc_bias = settings.take("bias", bool, False)
    decoder = read_decoder(settings, qkv_bias=settings.take("qkv_bias", bool, False))
    for name, want in (
        ("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size),
        ("num_hidden_layers", 1),
    ):  # fmt: skip
        if getattr(decoder, name) != want:
            raise ValueError(
                f"{settings.source}: {name} of an EAGLE head for this model must be {want}, got "
                f"{getattr(decoder, name)}: take a head that was trained for it"
            )
    return EagleConfig(decoder, fc_bias, "embed_tokens.weight" in tensors)


def sources(config: EagleConfig) -> Params:
    """Returns where each weight lies in the checkpoint."""
    c, E = config.decoder, config.decoder.hidden_size
    layer = layer_sources(c, "layers.0.", E)
    embed = Source.whole("embed_tokens.weight", c.vocab_size, E)
    fc_bias = Source.whole("fc.bias", E) if config.fc_bias else None
    return host_value(
        Params,
        embed=embed if config.own_embed else None,
        fc=host_value(Linear, weight=Source.whole("fc.weight", E, 2 * E), bias=fc_bias, num_in=1),
        qkv=layer.qkv,
        o=layer.o,
        mlp_norm=layer.mlp_norm,
        gate_up=layer.gate_up,
        down=layer.down,
    )


def feature(config: EagleConfig, params: Params, hidden: Array, extras: dict[str, Array]) -> Array:
    """Returns the model's hidden states, [T, E]."""
    return hidden


def layers(
    config: EagleConfig, params: Params, x: Array, feature: Array, kv: tuple[Any, ...],
    inputs: Inputs, ops: Ops,
) -> tuple[Array, Array, tuple[Any, ...]]:  # fmt: skip
    """Runs the layer on x, embeddings [T, E], and the feature of the tokens before them, [T, E]."""
    c = config.decoder
    x = ops.linear(jnp.concatenate([x, feature], -1), params.fc)
    heads = RopeAndNorm(*rotation(c.rope, inputs), None, None, c.rms_norm_eps)
    spec = AttentionSpec(0, None, c.head_dim**-0.5)
    out, cache = ops.rotate_attend(ops.project_qkv(x, params.qkv), heads, kv[0], spec)
    x, h = ops.add_norm(x, ops.project(out, params.o), params.mlp_norm, c.rms_norm_eps)
    mlp = ops.mlp(h, params.gate_up, params.down)
    x, _ = ops.add_norm(x, mlp, params.mlp_norm, c.rms_norm_eps)  # the sum alone is used
    return x, x, (cache,)


def logits(config: EagleConfig, params: Params, hidden: Array, target: Target) -> Array:
    """Scores every token by the model's head, [..., V]."""
    return target.logits(hidden)


eagle = Drafter(
    "eagle", Params, sources, own_or_shared_embed, feature, layers, logits, read=read,
    tensor_parallel=True,
)  # fmt: skip
