"""Multi-head latent attention in the layers of a mixture. arXiv:2405.04434.

A token's keys and values of all heads are products of one latent, which alone is cached, and a
rotated key that all heads share. `ops.attend_latent` makes them, or runs absorbed.
"""

from dataclasses import dataclass
import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.latent import LatentAttention
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Ops, Source
from jaxrunner.models.llama import Turn
from jaxrunner.models.mixtures.mixture import FeedForward, MixtureConfig
from jaxrunner.models.sources import linear_source
from jaxrunner.ops.plain import rms_norm, rotate
from jaxrunner.pytree import each, leaf, nested, pytree
from jaxrunner.types import Array

LATENT_EPS = (
    1e-6  # of norms of latents, whatever `rms_norm_eps` is: so the authors' own code has it
)


@dataclass(frozen=True, kw_only=True)
class LatentConfig(MixtureConfig):
    """A mixture whose attention is latent; `head_dim` is of what is rotated."""

    kv_lora_rank: int
    q_lora_rank: int  # 0 where queries are made of hidden states
    qk_nope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_interleave: bool  # whether neighbours are rotated together, in the checkpoint

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer: a latent and the rotated key of each token."""
        kind = LatentAttention.of(self.kv_lora_rank + self.head_dim)
        return (kind,) * self.num_hidden_layers

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        n, rank, q_rank = self.qk_nope_head_dim, self.kv_lora_rank, self.q_lora_rank
        return super().dims | dict(
            latent=rank + self.head_dim, kv_rank=rank, q_rank=q_rank, q_latent=q_rank > 0,
            q_inputs=q_rank or self.hidden_size, qk_dim=n + self.head_dim,
            v_dim=self.v_head_dim, kv_dims=n + self.v_head_dim,
        )  # fmt: skip


@pytree
class LatentLayer(FeedForward):
    """Weights of one layer. Dimensions that are rotated together lie half of them apart.

    kv_up makes a head's key and value of a latent. Heads are its second axis, so that both are
    runs of it, and no step copies them.
    """

    attn_norm: Array = leaf("E", "param")
    q_down: Linear | None = nested(outputs="q_rank", inputs="E", bias="qkv_bias", when="q_latent")
    q_norm: Array | None = leaf("q_rank", "param", when="q_latent")
    q: Linear = nested(outputs="H qk_dim", inputs="q_inputs")
    kv_down: Linear = nested(outputs="latent", inputs="E", bias="qkv_bias")
    kv_norm: Array = leaf("kv_rank", "param")
    kv_up: Array = leaf("kv_dims H kv_rank", "param")
    o: Linear = nested(outputs="E", inputs="H v_dim", num_in=2, bias="o_bias")
    mlp_norm: Array = leaf("E", "param")
    per_head: ClassVar[tuple[str, ...]] = ("kv_up",)

    def attend(
        self, config: LatentConfig, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        rank, num_still, x = config.kv_lora_rank, config.qk_nope_head_dim, h
        if self.q_down is not None and self.q_norm is not None:
            x = rms_norm(ops.linear(h, self.q_down), self.q_norm, LATENT_EPS)
        q_THD, kv_TD = ops.linear(x, self.q), ops.linear(h, self.kv_down)
        still_THN, turned_THD = jnp.split(q_THD, [num_still], -1)
        latent_TR = rms_norm(kv_TD[:, :rank], self.kv_norm, LATENT_EPS)
        key_TD = rotate(kv_TD[:, None, rank:], *turn)[:, 0]
        q_THD = jnp.concatenate([still_THN, rotate(turned_THD, *turn)], -1)
        latents_TD = jnp.concatenate([latent_TR, key_TD], -1)
        spec = spec._replace(scale=config.softmax_scale, value_dim=rank)
        out_THV, cache = ops.attend_latent(q_THD, latents_TD, self.kv_up, cache, spec)
        return ops.project(out_THV, self.o), cache


@pytree
class Params:
    """Weights of a mixture with latent attention."""

    embed: Array = leaf("V E", "param")
    norm: Array = leaf("E", "param")
    head: Linear | None = nested(outputs="V", inputs="E", when="untied")
    layers: tuple[LatentLayer, ...] = each("Y")


def read_latent(settings: Settings, *, interleaved: bool) -> dict[str, Any]:
    """Returns the fields of a `LatentConfig` that other mixtures do not have.

    interleaved: whether neighbours are rotated together.

    Raises:
      ValueError: a size that other ones contradict; names it.
    """
    turned, still = settings.size("qk_rope_head_dim"), settings.size("qk_nope_head_dim")
    settings.expect("head_dim", turned)
    settings.expect("qk_head_dim", turned + still)
    settings.expect("num_key_value_heads", settings.size("num_attention_heads"))
    bias = settings.take("attention_bias", bool, False)
    return dict(
        kv_lora_rank=settings.size("kv_lora_rank"),
        q_lora_rank=settings.size("q_lora_rank", 0, least=0),
        qk_nope_head_dim=still,
        v_head_dim=settings.size("v_head_dim"),
        softmax_scale=(turned + still) ** -0.5 * _yarn_scale(settings),
        rope_interleave=interleaved,
        qkv_bias=bias,
        o_bias=bias,
    )


def _yarn_scale(settings: Settings) -> float:
    """Returns what YaRN multiplies scores with, beside what it does to sines: the square of its
    gain for `mscale_all_dim`. arXiv:2309.00071."""
    scaling = settings.section("rope_parameters") or settings.section("rope_scaling")
    mscale = 0.0 if scaling is None else scaling.take("mscale_all_dim", float, 0.0)
    if scaling is None or not mscale:
        return 1.0
    return (0.1 * mscale * math.log(max(scaling.take("factor", float), 1.0)) + 1) ** 2


def attention_sources(c: LatentConfig, prefix: str, width: int) -> dict[str, Any]:
    """Returns where the fields of a layer before its MLP lie, by their names."""
    H, rank, n, v = c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.v_head_dim
    at, D, q_rank = f"{prefix}self_attn.", c.head_dim, c.q_lora_rank

    def one(name: str, *shape: int, held: tuple[int, ...] = ()) -> Source:
        return Source.whole(name, *shape, held=held)

    def down(name: str, size: int, order: np.ndarray | None = None) -> Linear:
        parts = one(f"{at}{name}.weight", size, width), one(f"{at}{name}.bias", size)
        if order is not None:
            parts = _reordered(parts[0], order, 0), _reordered(parts[1], order, 0)
        return linear_source(parts[0], parts[1] if c.qkv_bias else None)

    inputs, name = q_rank or width, "q_b_proj" if q_rank else "q_proj"
    q = one(f"{at}{name}.weight", H * (n + D), inputs, held=(H, n + D, inputs))
    o = one(f"{at}o_proj.weight", width, H * v, held=(width, H, v))
    return dict(
        attn_norm=one(f"{prefix}input_layernorm.weight", width),
        q_down=down("q_a_proj", q_rank) if q_rank else None,
        q_norm=one(f"{at}q_a_layernorm.weight", q_rank) if q_rank else None,
        q=linear_source(_reordered(q, _order(c, n), 1)),
        kv_down=down("kv_a_proj_with_mqa", rank + D, _order(c, rank)),
        kv_norm=one(f"{at}kv_a_layernorm.weight", rank),
        kv_up=_heads_inside(one(f"{at}kv_b_proj.weight", H * (n + v), rank), H),
        o=linear_source(o, one(f"{at}o_proj.bias", width) if c.o_bias else None, num_in=2),
        mlp_norm=one(f"{prefix}post_attention_layernorm.weight", width),
    )


def _order(c: LatentConfig, still: int) -> np.ndarray:
    """Returns which of a checkpoint's dimensions each of ours is: `still` ones, then those that
    are rotated, whose pairs lie half of them apart."""
    turned = np.arange(c.head_dim)
    if c.rope_interleave:
        turned = turned.reshape(-1, 2).T.ravel()
    return np.concatenate([np.arange(still), still + turned])


def _reordered(source: Source, order: np.ndarray, axis: int) -> Source:
    """Returns a source of a weight of which one axis has another order."""
    split = source.split
    assert split is not None
    return source._replace(
        join=lambda arrays: np.take(source.join(arrays), order, axis),
        split=lambda held: split(np.take(held, np.argsort(order), axis)),
    )


def _heads_inside(source: Source, num_heads: int) -> Source:
    """Returns a source of a weight, [H * outputs, inputs], that is held as [outputs, H, inputs]."""
    (shape,) = source.shapes
    return source._replace(
        is_module=True,
        join=lambda arrays: arrays[0].reshape(num_heads, -1, shape[1]).swapaxes(0, 1),
        split=lambda held: [held.swapaxes(0, 1).reshape(shape)],
    )
