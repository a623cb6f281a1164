"""Llama-like decoders: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Flags of the config cover the families that differ by a bias, a norm or a window.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner.caches.cache_group import layer_groups
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Model, Ops, RopeAndNorm, Source
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.rope import rotation
from jaxrunner.models.sources import (
    linear_source,
    mlp_sources,
    norm_sources,
    packed_source,
    product_source,
)
from jaxrunner.ops.plain import no_residual
from jaxrunner.ops.rounded_tokens import TokensForProducts, told_readers
from jaxrunner.pytree import each, host_value, leaf, nested, pytree
from jaxrunner.types import Array, Inputs

Turn = tuple[Array, Array]  # cosine and sine of each token's angles, [T, 1, D / 2]


@pytree
class Attention:
    """Weights of a layer but for its MLP. A KV head's query heads, key and value are packed
    along P.

    A layer is a class of these and of what its `feed_forward` reads; another kind of attention is
    another `attend`. `config` is the family's.
    """

    attn_norm: Array = leaf("E", "param")
    qkv: Linear = nested(outputs="K P D", inputs="E", bias="qkv_bias")
    q_norm: Array | None = leaf("D", "param", when="qk_norm")
    k_norm: Array | None = leaf("D", "param", when="qk_norm")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2, bias="o_bias")
    mlp_norm: Array = leaf("E", "param")

    def attend(
        self, config: Any, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        heads = RopeAndNorm(*turn, self.q_norm, self.k_norm, config.rms_norm_eps)
        out, cache = ops.rotate_attend(ops.project_qkv(h, self.qkv), heads, cache, spec)
        return ops.project(out, self.o), cache


@pytree
class Mlp:
    """Weights of a gated MLP, of a layer."""

    gate_up: Linear = nested(outputs="gate_up F", inputs="E", bias="mlp_bias")
    down: Linear = nested(outputs="E", inputs="F", bias="mlp_bias")

    def feed_forward(self, config: Any, ops: Ops, h: Array) -> tuple[Array, dict[str, Array]]:
        """Returns what the MLP adds to the residual, given h, [T, E]; and no extras."""
        return ops.mlp(h, self.gate_up, self.down), {}


@pytree
class Layer(Mlp, Attention):
    """Weights of one layer."""


@pytree
class Params:
    """Weights of a decoder."""

    embed: Array = leaf("V E", "param")
    norm: Array = leaf("E", "param")
    head: Linear | None = nested(outputs="V", inputs="E", when="untied")
    layers: tuple[Layer, ...] = each("Y")


class NextNorm(NamedTuple):
    """The norm that a layer ends with, and what `Ops.add_norm` is told of who reads it."""

    weight: Array
    told: dict[str, Any]


def embed(config: DecoderConfig, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E]."""
    return params.embed[inputs.token_ids]


def scaled_embed(config: Any, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E], times `config.embedding_multiplier`."""
    return embed(config, params, inputs) * config.embedding_multiplier


def layers(
    config: DecoderConfig,
    params: Params,
    x: Array,
    kv: tuple[Any, ...],
    inputs: Inputs,
    ops: Ops,
    *,
    first: int = 0,
    last: int | None = None,
    extras: tuple[str, ...] = (),
    turn: Any = None,
    layer: Callable[..., Any] | None = None,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:
    """Runs layers `first` to `last`, to the end by default, on x, [T, E].

    kv: their caches. extras: names of arrays to return too; "residual.2" is the sum, [T, E], that
    layer 2 reads, as speculators take it; behind the last layer it is the sum that the norm reads.
    Other arrays that a layer's `feed_forward` returns have its number, too. turn: what layers'
    `attend` takes by this name, where that is not the rotation of the config alone. layer: the
    function that runs one, where that is not attention and what is behind it.

    Returns hidden states, [T, E], normed behind the last layer of all; caches; extras by name.

    Raises:
      ValueError: there is no such extra among these layers; names it.
    """
    num, eps = config.num_hidden_layers, config.rms_norm_eps
    groups, last = layer_groups(config.cache_kinds), num if last is None else last
    run = jax.jit(functools.partial(layer or _layer, config, ops), static_argnames="spec")
    turn, caches, found = turn or rotation(config.rope, inputs), [], {}
    chosen = params.layers[first:last]
    # Each layer ends with the norm of the next one, which adds what the layer gives to x. One jit
    # is for all of them: equal layers are traced once.
    norms = _norms(params, chosen, told=layer is None)
    ends = norms[1:] if layer is None else [norm.weight for norm in norms[1:]]
    x, h = ops.add_norm(x, no_residual(x), norms[0].weight, eps, **norms[0].told)
    for i, (w, end, cache) in enumerate(zip(chosen, ends, kv, strict=True), first):
        found[f"residual.{i}"] = x
        spec = AttentionSpec(groups[i], config.windows[i], config.head_dim**-0.5)
        x, h, cache, told = run(x, h, w, end, cache, turn, spec=spec)
        caches.append(cache)
        found |= {f"{name}.{i}": array for name, array in told.items()}
    if last == num:
        found[f"residual.{num}"] = x
        if isinstance(h, TokensForProducts):  # nobody reads hidden states so
            _, h = ops.add_norm(x, no_residual(x), params.norm, eps)
    if unknown := sorted(set(extras) - set(found)):
        raise ValueError(f"extras {unknown} are none of these layers': take some of {[*found]}")
    return (h if last == num else x), tuple(caches), {name: found[name] for name in extras}


def logits(config: DecoderConfig, params: Params, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V], in its dtype."""
    head = Linear(params.embed, None) if params.head is None else params.head
    return head.product(hidden)


def _layer(
    config: DecoderConfig, ops: Ops, x: Array, h: Array, w: Any, norm: NextNorm, cache: Any,
    turn: Turn, *, spec: AttentionSpec,
) -> tuple[Array, Array, Any, dict[str, Array]]:  # fmt: skip
    """Runs a layer on h, the norm of x. Returns the next x, its norm, the cache, and extras."""
    residual, cache = w.attend(config, ops, h, turn, cache, spec)
    of_mlp, eps = _readers(w, Mlp.feed_forward), config.rms_norm_eps
    x, h = ops.add_norm(x, residual, w.mlp_norm, eps, **of_mlp)
    residual, told = w.feed_forward(config, ops, h)
    return *ops.add_norm(x, residual, norm.weight, eps, **norm.told), cache, told


def _norms(params: Params, chosen: Sequence[Any], *, told: bool) -> list[NextNorm]:
    """Returns the norms before layers, and behind the last one, which is told the same.

    So all layers are equal. told: whether of their readers.
    """
    norms = [NextNorm(w.attn_norm, _readers(w, Attention.attend) if told else {}) for w in chosen]
    return [*norms, NextNorm(params.norm, norms[-1].told)]


def _readers(w: Any, method: Any) -> dict[str, Any]:
    """Returns the weights that alone read what a layer's attention or MLP is given, as `readers`.

    Nothing where its class has another method for it, or where they read it as it is.
    """
    if getattr(type(w), method.__name__, None) is not method:
        return {}
    return told_readers(w.qkv if method is Attention.attend else w.gate_up)


def read(settings: Settings) -> DecoderConfig:
    """Reads a Llama config."""
    bias = settings.take("attention_bias", bool, False)
    mlp_bias = settings.take("mlp_bias", bool, False)
    return read_decoder(settings, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def sources(config: DecoderConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    c, E = config, config.hidden_size
    layers = tuple(layer_sources(c, f"model.layers.{i}.", E) for i in range(c.num_hidden_layers))
    return host_value(Params, **outer_sources(c), layers=layers)


def outer_sources(c: DecoderConfig) -> dict[str, Any]:
    """Returns where the fields of `Params` but for layers lie, by their names."""
    V, E = c.vocab_size, c.hidden_size
    return dict(
        embed=Source.whole("model.embed_tokens.weight", V, E),
        norm=Source.whole("model.norm.weight", E),
        head=None if c.tie_word_embeddings else product_source("lm_head", V, E),
    )


def layer_sources(c: DecoderConfig, prefix: str, width: int) -> Layer:
    """Returns where a layer lies whose names begin with `prefix`, its attention reading `width`."""
    mlp = mlp_sources(prefix + "mlp.", c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
    return host_value(Layer, **attention_sources(c, prefix, width), **mlp)


def attention_sources(c: DecoderConfig, prefix: str, width: int) -> dict[str, Any]:
    """Returns where the fields of `Attention` lie, which reads `width`, by their names."""
    E, D, at = c.hidden_size, c.head_dim, f"{prefix}self_attn."
    H, K = c.num_attention_heads, c.num_key_value_heads

    def one(present: bool, name: str, *shape: int, held: tuple[int, ...] = ()) -> Source | None:
        return Source.whole(name, *shape, held=held) if present else None

    def heads(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([a.reshape(K, -1, D, *a.shape[1:]) for a in arrays], 1)

    qkv = {f"{at}q_proj": H * D, f"{at}k_proj": K * D, f"{at}v_proj": K * D}
    return norm_sources(prefix, E) | dict(
        qkv=packed_source(qkv, heads, width, bias=c.qkv_bias),
        q_norm=one(c.qk_norm, f"{at}q_norm.weight", D),
        k_norm=one(c.qk_norm, f"{at}k_norm.weight", D),
        o=linear_source(
            one(True, f"{at}o_proj.weight", E, H * D, held=(E, H, D)),
            one(c.o_bias, f"{at}o_proj.bias", E),
            num_in=2,
        ),
    )


llama = Model(read, Params, embed, layers, logits, sources, tensor_parallel=True)
