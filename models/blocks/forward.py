"""Runs decoders with layers of `blocks`.

Operations that kernels fuse are called where a family's maths is theirs exactly: RMSNorm behind a
sum, gated MLPs, and norms of heads before their rotation. All else is plain JAX.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.caches.cache_group import layer_groups
from jaxrunner.kernels_pallas.reference import capped
from jaxrunner.linear import Linear, Weights
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.weights import Layer, Norm, Params
from jaxrunner.models.rope import rotation
from jaxrunner.ops.plain import (
    ACTIVATIONS,
    rms_norm,
    rms_norm_of_one_more,
    rotate,
    summed,
    unpacked,
)
from jaxrunner.ops.rounded_tokens import told_readers
from jaxrunner.types import Array, Inputs


class Addend(NamedTuple):
    """The array that is to be added to a residual stream."""

    residual: Array  # [T, E], or parts of it, as of `Ops.project`
    end: Norm | None  # of the residual, before it is added


def embed(config: BlockConfig, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E], with learned positions where there are some."""
    x = params.embed[inputs.token_ids]
    if config.embed_scale != 1:
        x = x * jnp.asarray(config.embed_scale, x.dtype)
    return x if params.positions is None else x + params.positions[inputs.positions]


def layers(
    config: BlockConfig, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers `first` to `last`, to the end by default, on x, [T, E].

    Does what `llama.layers` does, extras included; of `post_norm` these are norms of sums.

    Raises:
      ValueError: there is no such extra among these layers; names it.
    """
    num = config.num_hidden_layers
    last = num if last is None else last
    known = [f"residual.{i}" for i in range(first, last + (last == num))]
    if unknown := sorted(set(extras) - set(known)):
        raise ValueError(f"extras {unknown} are none of these layers': take some of {known}")
    groups, scale = layer_groups(config.cache_kinds), config.score_scale or config.head_dim**-0.5
    # One jit for all layers: equal layers are traced once.
    layer = jax.jit(functools.partial(_layer, config, ops), static_argnames="spec")
    turns = {rope: rotation(rope, inputs) for rope in dict.fromkeys(config.ropes[first:last])}
    growth, caches, found = _query_growth(config, inputs), [], {}
    addend = Addend(jnp.zeros_like(x), None)  # of the layers before one, not added to x yet
    for i, cache in zip(range(first, last), kv, strict=True):
        if (name := f"residual.{i}") in extras:
            found[name] = x + _whole(config, addend, x)
            if config.post_norm:
                found[name] = _add_norm(config, ops, x, addend, params.layers[i].attn_norm)[1]
        spec = AttentionSpec(groups[i], config.windows[i], scale, soft_cap=config.score_cap)
        turn = *turns[config.ropes[i]], growth
        x, addend, cache = layer(x, addend, params.layers[i], cache, turn, spec=spec)
        caches.append(cache)
    if last < num:
        return x + _whole(config, addend, x), tuple(caches), found
    x, hidden = _add_norm(config, ops, x, addend, params.norm)
    if (name := f"residual.{num}") in extras:
        found[name] = hidden if config.post_norm else x
    return hidden, tuple(caches), found


def logits(config: BlockConfig, params: Params, hidden: Array) -> Array:
    """Scores every token of the vocabulary: hidden [..., E] -> [..., V], in its dtype."""
    head = Linear(params.embed, None) if params.head is None else params.head
    scores = head.product(hidden)
    if config.logit_scale == 1 and config.logit_cap is None:
        return scores
    scores = scores.astype(jnp.float32) * config.logit_scale
    return capped(scores, config.logit_cap).astype(hidden.dtype)


def _layer(
    config: BlockConfig, ops: Ops, x: Array, addend: Addend, w: Layer, cache: Any,
    turn: tuple[Array, Array, Array | None], *, spec: AttentionSpec,
) -> tuple[Array, Addend, Any]:  # fmt: skip
    """Runs a layer on x + addend. Returns the next x, what it is to gain, and the cache."""
    of_attn = () if config.post_norm else (w.qkv,)
    if config.parallel and w.mlp_norm is None:
        of_attn = *of_attn, w.gate_up
    x, h = _add_norm(config, ops, x, addend, w.attn_norm, of_attn)
    x = h if config.post_norm else x
    out, cache = _attend(config, ops, h, w, cache, turn, spec)
    attended = _scaled(config, Addend(ops.project(out, w.o), w.attn_end_norm), x)
    if config.parallel:
        h = h if w.mlp_norm is None else _normed(config, x, w.mlp_norm)
    else:
        of_mlp = () if config.post_norm else (w.gate_up,)
        x, h = _add_norm(config, ops, x, attended, w.mlp_norm, of_mlp)
        x = h if config.post_norm else x
    added = _scaled(config, Addend(_mlp(config, ops, h, w), w.mlp_end_norm), x)
    if config.parallel:
        added = Addend(_whole(config, attended, x) + _whole(config, added, x), None)
    return x, added, cache


def _attend(
    config: BlockConfig, ops: Ops, h: Array, w: Layer, cache: Any,
    turn: tuple[Array, Array, Array | None], spec: AttentionSpec,
) -> tuple[Array, Any]:  # fmt: skip
    """Attends with h, [T, E]. Returns the attended values, [T, H, D], and the cache."""
    eps, (cos, sin, growth) = config.rms_norm_eps, turn
    of_layers = w.q_norm is not None and config.norm == "layer"
    if w.q_width_norm is None and not of_layers and growth is None:
        heads = RopeAndNorm(cos, sin, w.q_norm, w.k_norm, eps, config.norm == ONE_MORE)
        return ops.rotate_attend(ops.project_qkv(h, w.qkv), heads, cache, spec)
    q, k, v = unpacked(ops.linear(h, w.qkv))
    if w.q_width_norm is not None and w.k_width_norm is not None:
        q, k = ops.norm_heads(q, w.q_width_norm, eps), ops.norm_heads(k, w.k_width_norm, eps)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = (
            NORMS[config.norm](q, w.q_norm, None, eps),
            NORMS[config.norm](k, w.k_norm, None, eps),
        )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return ops.attend(q if growth is None else q * growth.astype(q.dtype), k, v, cache, spec)


def _mlp(config: BlockConfig, ops: Ops, h: Array, w: Layer) -> Array:
    """Returns what the MLP adds to the residual, as `Ops.project` does."""
    if config.gated:
        return ops.mlp(h, w.gate_up, w.down, config.activation)
    return ops.project(ACTIVATIONS[config.activation](ops.linear(h, w.gate_up)[:, 0]), w.down)


def _add_norm(
    config: BlockConfig, ops: Ops, x: Array, addend: Addend, norm: Norm | None,
    readers: tuple[Weights, ...] = (),
) -> tuple[Array, Array]:  # fmt: skip
    """Returns x + addend and its norm, which is itself where there is none.

    readers: as of `Ops.add_norm`.
    """
    if norm is not None and config.norm in ("rms", ONE_MORE):
        ends = () if addend.end is None else (addend.end.norm_weight,)
        how = norm.norm_weight, config.rms_norm_eps, config.norm == ONE_MORE, *ends
        return ops.add_norm(x, addend.residual, *how, **told_readers(*readers))
    total = x + _whole(config, addend, x)
    return total, total if norm is None else _normed(config, total, norm)


def _scaled(config: BlockConfig, addend: Addend, x: Array) -> Addend:
    """Returns an addend times the scale of residuals, if they have one."""
    if config.residual_scale == 1:
        return addend
    scaled = _whole(config, addend, x).astype(jnp.float32) * config.residual_scale
    return Addend(scaled.astype(x.dtype), None)


def _whole(config: BlockConfig, addend: Addend, x: Array) -> Array:
    """Returns what is added to x: the residual, or its norm; an array like x."""
    residual, end = addend
    whole = summed(residual, x.dtype)
    return whole if end is None else _normed(config, whole, end)


def _normed(config: BlockConfig, x: Array, norm: Norm) -> Array:
    return NORMS[config.norm](x, norm.norm_weight, norm.norm_bias, config.rms_norm_eps)


def _query_growth(config: BlockConfig, inputs: Inputs) -> Array | None:
    """Returns what queries are multiplied by, [T, 1, 1], float32."""
    if config.query_growth is None:
        return None
    beta, length = config.query_growth
    turns = (inputs.positions // length).astype(jnp.float32)
    return (1 + beta * jnp.log1p(turns))[:, None, None]


def _rms(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    return rms_norm(x, weight, eps)


def _rms_of_one_more(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    return rms_norm_of_one_more(x, weight, eps)


def _layer_norm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """LayerNorm over the last axis, computed in float32. arXiv:1607.06450."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    x32 = x32 * jnp.broadcast_to(weight.astype(jnp.float32), x.shape)
    if bias is not None:
        x32 = x32 + jnp.broadcast_to(bias.astype(jnp.float32), x.shape)
    return x32.astype(x.dtype)


# (x, weight, bias, eps) -> the norm over the last axis of x.
ONE_MORE = "rms of 1 + w"
NORMS: dict[str, Callable[[Array, Array, Array | None, float], Array]] = {
    "rms": _rms,
    ONE_MORE: _rms_of_one_more,
    "layer": _layer_norm,
}
