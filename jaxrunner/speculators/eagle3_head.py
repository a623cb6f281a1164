"""The EAGLE-3 head: one decoder layer that drafts from a target's hidden states. arXiv:2503.01840.

At position t it reads three hidden states of the target, or its own output at t - 1, and the
embedding of token t + 1; its logits are of token t + 2. It has no loop: it runs T tokens of any
rows.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm, Source
from jaxrunner.models.llama import layer_sources
from jaxrunner.models.rope import rotation
from jaxrunner.models.sources import linear_source
from jaxrunner.ops.plain import no_residual, rms_norm
from jaxrunner.pytree import host_value, leaf, nested, pytree
from jaxrunner.speculators.eagle3_config import Eagle3Config
from jaxrunner.types import Array, Inputs


@pytree
class Params:
    """Weights of a head. A KV head's query heads, key and value are packed along P."""

    fc: Linear = nested(outputs="E", inputs="all_aux")
    all_norm: Array | None = leaf("all_aux", "param", when="norm_before_fc")
    aux_norm: tuple[Array, ...] | None = leaf("target_E", "param", when="fc_norm", each="aux")
    embed_norm: Array = leaf("E", "param")
    hidden_norm: Array = leaf("E", "param")
    qkv: Linear = nested(outputs="K P D", inputs="2E", bias="qkv_bias")
    q_norm: Array | None = leaf("D", "param", when="qk_norm")
    k_norm: Array | None = leaf("D", "param", when="qk_norm")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2, bias="o_bias")
    mlp_norm: Array = leaf("E", "param")
    gate_up: Linear = nested(outputs="gate_up F", inputs="E", bias="mlp_bias")
    down: Linear = nested(outputs="E", inputs="F", bias="mlp_bias")
    norm: Array = leaf("E", "param")
    embed: Array | None = leaf("own_V E", "param", when="own_embed")  # None: the target's
    head: Linear | None = nested(outputs="draft_V", inputs="E", when="own_head")
    d2t: Array | None = leaf("draft_V", jnp.int32, when="reduced")  # a token's distance to its id


def feature(config: Eagle3Config, params: Params, aux: tuple[Array, ...]) -> Array:
    """Returns what the layer reads of the target, [T, E].

    aux: the inputs of its layers `config.aux_layers`, [T, target_E] each, in that order.
    """
    eps = config.decoder.rms_norm_eps
    if params.aux_norm is not None:
        aux = tuple(rms_norm(x, w, eps) for x, w in zip(aux, params.aux_norm, strict=True))
    x = jnp.concatenate(aux, -1)
    if params.all_norm is not None:
        x = rms_norm(x, params.all_norm, eps)
    return params.fc.product(x)


def layers(
    config: Eagle3Config, params: Params, embeddings: Array, feature: Array, kv: Any,
    inputs: Inputs, ops: Ops, *, group: int = 0,
) -> tuple[Array, Array, Any]:  # fmt: skip
    """Runs the layer on embeddings, [T, E], of the tokens that follow the states of `feature`.

    feature: [T, E], of the target or fed back. kv: the cache of the layer, in cache group `group`.
    inputs: positions are those of the states, not of the tokens.

    Returns the hidden states that `logits` takes, [T, E]; the next feature, [T, E]; the cache.
    """
    w, c = params, config.decoder
    eps = c.rms_norm_eps
    _, e = ops.add_norm(embeddings, no_residual(embeddings), w.embed_norm, eps)
    x, h = ops.add_norm(feature, no_residual(feature), w.hidden_norm, eps)
    if config.norm_before_residual:
        x = h
    heads = RopeAndNorm(*rotation(c.rope, inputs), w.q_norm, w.k_norm, eps)
    spec = AttentionSpec(group, c.windows[0], c.head_dim**-0.5)
    qkv = ops.project_qkv(jnp.concatenate([e, h], -1), w.qkv)
    out, kv = ops.rotate_attend(qkv, heads, kv, spec)
    x, h = ops.add_norm(x, ops.project(out, w.o), w.mlp_norm, eps)
    x, h = ops.add_norm(x, ops.mlp(h, w.gate_up, w.down), w.norm, eps)
    return h, (h if config.norm_output else x), kv


def logits(config: Eagle3Config, params: Params, target_head: Any, hidden: Array) -> Array:
    """Scores the tokens of the head's vocabulary: hidden [..., E] -> [..., draft_V].

    target_head: has a `product` that scores them where the head has no weights of its own for it.
    """
    if params.head is not None:
        return params.head.product(hidden)
    if config.is_tied and params.embed is not None:
        return Linear(params.embed, None).product(hidden)
    return target_head.product(hidden)


def to_target_ids(params: Params, ids: Array) -> Array:
    """Returns the target's ids of tokens of the head's vocabulary, int32 both."""
    return ids if params.d2t is None else ids + params.d2t[ids]


def sources(config: Eagle3Config) -> Params:
    """Returns where each weight lies in a checkpoint."""
    c = config
    E, V, width = c.decoder.hidden_size, c.decoder.vocab_size, c.target_hidden_size
    num_aux, whole = len(c.aux_layers), Source.whole
    layer = layer_sources(c.decoder, c.prefix, 2 * E)
    each_norm = tuple(whole(f"fc_norm.{i}.weight", width) for i in range(num_aux))
    head = linear_source(whole("lm_head.weight", c.draft_vocab_size, E))
    return host_value(
        Params,
        fc=linear_source(whole("fc.weight", E, num_aux * width)),
        all_norm=whole("input_norm.weight", num_aux * width) if c.norm_before_fc else None,
        aux_norm=each_norm if c.fc_norm else None,
        embed_norm=layer.attn_norm,
        hidden_norm=whole(f"{c.prefix}hidden_norm.weight", E),
        qkv=layer.qkv,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        o=layer.o,
        mlp_norm=layer.mlp_norm,
        gate_up=layer.gate_up,
        down=layer.down,
        norm=whole("norm.weight", E),
        embed=whole("embed_tokens.weight", V, E) if c.own_embed else None,
        head=head if c.own_head else None,
        d2t=_map_source(c.draft_vocab_size, V, c.mapped_back) if c.reduced else None,
    )


def _map_source(draft_vocab: int, vocab: int, mapped_back: bool) -> Source:
    """Returns where the map of a smaller vocabulary lies, and its inverse, which is checked."""
    names, shapes = ("d2t", "t2d")[: 1 + mapped_back], ((draft_vocab,), (vocab,))
    return Source(names, shapes[: 1 + mapped_back], functools.partial(_join_map, vocab), None)


def _join_map(vocab: int, parts: list[np.ndarray]) -> np.ndarray:
    d2t = parts[0].astype(np.int64)
    ids = d2t + np.arange(d2t.size)
    if ids.min() < 0 or ids.max() >= vocab:
        raise ValueError(
            f"d2t must map tokens of the head to ids from 0 to {vocab - 1}, got ids from "
            f"{ids.min()} to {ids.max()}: get the head of this target"
        )
    if len(parts) == 2 and not np.array_equal(np.flatnonzero(parts[1]), np.sort(ids)):
        raise ValueError(
            f"t2d must mark the {ids.size} ids that d2t maps to, got {np.count_nonzero(parts[1])} "
            "others: download the checkpoint again"
        )
    return d2t.astype(np.int32)
