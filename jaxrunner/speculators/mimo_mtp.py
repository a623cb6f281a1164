"""MiMo's layer of multi-token prediction as a drafter. arXiv:2505.07608.

As vLLM has it (`mimo.py` and `mimo_mtp.py`, written by the model's makers): the layer reads the
sum of the model's layers *before* the final norm, beside the embedding of the token that follows,
hidden states first. Tokens after the first are drafted by the same layer, from its own normed
output. vLLM also zeroes the embedding at position 0, which had no state before it in an earlier
layout of its inputs; the modeling file of the checkpoints does not, and neither does this file.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.config import ModelConfig
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm, Source
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import Layer, layer_sources
from jaxrunner.models.mimo import MTP, MimoConfig
from jaxrunner.models.rope import rotation
from jaxrunner.models.sources import product_source
from jaxrunner.ops.plain import rms_norm
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.speculators.drafter import Drafter, Target
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class MimoMtpConfig:
    """The layer that drafts: of the sizes of the model's own."""

    decoder: DecoderConfig

    @property
    def architecture(self) -> str:
        """Its name in messages."""
        return self.decoder.architecture

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return self.decoder.dims | dict(pair=2 * self.decoder.hidden_size)

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Keys and values of all tokens."""
        return self.decoder.cache_kinds[:1]

    @property
    def extras(self) -> tuple[str, ...]:
        """The sum behind the model's last layer."""
        return (f"residual.{self.decoder.num_hidden_layers}",)


@pytree
class Params:
    """Weights of the layer and of what joins its inputs; embedding and head are the model's."""

    token_norm: Array = leaf("E", "param")
    hidden_norm: Array = leaf("E", "param")
    input_proj: Linear = nested(outputs="E", inputs="pair")
    layer: Layer
    norm: Array = leaf("E", "param")


def read(target: ModelConfig) -> MimoMtpConfig:
    """Returns the config of the layer that a model's own config declares.

    Raises:
      ValueError: there is none, or there are several.
    """
    assert isinstance(target, MimoConfig)
    if (num := target.num_nextn_predict_layers) != 1:
        raise ValueError(
            f"speculative_config.method='mtp' drafts with one layer, but config.json says "
            f"num_nextn_predict_layers={num}: take 'ngram' or 'eagle3', or a checkpoint with one"
        )
    return MimoMtpConfig(target)


def sources(config: MimoMtpConfig) -> Params:
    """Returns where each weight lies in the checkpoint of the model."""
    c, E, prefix = config.decoder, config.decoder.hidden_size, f"{MTP}0."
    return host_value(
        Params,
        token_norm=Source.whole(f"{prefix}token_layernorm.weight", E),
        hidden_norm=Source.whole(f"{prefix}hidden_layernorm.weight", E),
        input_proj=product_source(f"{prefix}input_proj", E, 2 * E),
        layer=layer_sources(c, prefix, E),
        norm=Source.whole(f"{prefix}final_layernorm.weight", E),
    )


def embed(config: MimoMtpConfig, params: Params, inputs: Inputs, target: Target) -> Array:
    """Returns the model's embeddings of tokens, [T, E]."""
    return target.embed(inputs)


def feature(
    config: MimoMtpConfig, params: Params, hidden: Array, extras: dict[str, Array]
) -> Array:
    """Returns the sum that the model's final norm reads, [T, E]."""
    (name,) = config.extras
    return extras[name]


def layers(
    config: MimoMtpConfig, params: Params, x: Array, feature: Array, kv: tuple[Any, ...],
    inputs: Inputs, ops: Ops,
) -> tuple[Array, Array, tuple[Any, ...]]:  # fmt: skip
    """Runs the layer on x, embeddings [T, E], and the feature of the tokens before them, [T, E]."""
    c, w, eps = config.decoder, params.layer, config.decoder.rms_norm_eps
    pair = rms_norm(feature, params.hidden_norm, eps), rms_norm(x, params.token_norm, eps)
    x = ops.linear(jnp.concatenate(pair, -1), params.input_proj)
    heads = RopeAndNorm(*rotation(c.rope, inputs), None, None, eps)
    spec = AttentionSpec(0, None, c.head_dim**-0.5)
    h = rms_norm(x, w.attn_norm, eps)
    out, cache = ops.rotate_attend(ops.project_qkv(h, w.qkv), heads, kv[0], spec)
    x, h = ops.add_norm(x, ops.project(out, w.o), w.mlp_norm, eps)
    _, h = ops.add_norm(x, ops.mlp(h, w.gate_up, w.down), params.norm, eps)
    return h, h, (cache,)


def logits(config: MimoMtpConfig, params: Params, hidden: Array, target: Target) -> Array:
    """Scores every token by the model's head, [..., V]; hidden states are normed already."""
    return target.logits(hidden)


# The rest of the files is the model.
_REST = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
mimo_mtp = Drafter(
    "mtp", Params, sources, embed, feature, layers, logits, spare=_REST, tensor_parallel=True
)
