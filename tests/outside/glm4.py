"""GLM-4 (0414): four norms a layer, and a rotation of half of each head, in neighbouring pairs."""

from dataclasses import dataclass
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.full import FullAttention
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import AttentionSpec, Model, Ops, Source
from jaxrunner.models.rope import Rope, rotation
from jaxrunner.pytree import each, host_value, leaf, nested, pytree
from jaxrunner.types import Array, Inputs


@dataclass(frozen=True)
class Config:
    """What the model is; lengths are in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    longest_len: int
    eps: float
    rope: Rope
    bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """Keys and values of all tokens, in each layer."""
        return (FullAttention(),) * self.num_hidden_layers

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return dict(
            Y=self.num_hidden_layers, H=self.num_heads, K=self.num_kv_heads, D=self.head_dim,
            E=self.hidden_size, F=self.intermediate_size, V=self.vocab_size, gate_up=2,
            qkv_bias=self.bias,
        )  # fmt: skip

    def cache_salt(self, prompt_len: int) -> bytes:
        """Nothing besides tokens."""
        return b""


@pytree
class Layer:
    """Weights of one layer, with a norm before and behind each half."""

    attn_norm: Array = leaf("E", "param")
    q: Linear = nested(outputs="H D", inputs="E", bias="qkv_bias")
    k: Linear = nested(outputs="K D", inputs="E", bias="qkv_bias")
    v: Linear = nested(outputs="K D", inputs="E", bias="qkv_bias")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2)
    attn_end_norm: Array = leaf("E", "param")
    mlp_norm: Array = leaf("E", "param")
    gate_up: Linear = nested(outputs="gate_up F", inputs="E")
    down: Linear = nested(outputs="E", inputs="F")
    mlp_end_norm: Array = leaf("E", "param")


@pytree
class Params:
    """Weights of the model."""

    embed: Array = leaf("V E", "param")
    norm: Array = leaf("E", "param")
    head: Linear = nested(outputs="V", inputs="E")
    layers: tuple[Layer, ...] = each("Y")


def read(settings: Settings) -> Config:
    """Reads config.json."""
    size, rope = settings.size, settings.section("rope_parameters") or Settings({})
    settings.expect("hidden_act", "silu")
    settings.expect("tie_word_embeddings", False)
    rope.expect("rope_type", "default")
    turned = int(size("head_dim") * rope.take("partial_rotary_factor", float, 0.5))
    theta = np.float32(rope.take("rope_theta", float, 10000.0))
    inv_freq = 1 / theta ** (np.arange(0, turned, 2, dtype=np.float32) / turned)
    config = Config(
        architecture="OutsideForCausalLM",
        vocab_size=size("vocab_size"),
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_hidden_layers=size("num_hidden_layers"),
        num_heads=size("num_attention_heads"),
        num_kv_heads=size("num_key_value_heads"),
        head_dim=size("head_dim"),
        longest_len=size("max_position_embeddings"),
        eps=settings.take("rms_norm_eps", float),
        rope=Rope(tuple(map(float, inv_freq))),
        bias=settings.take("attention_bias", bool, True),
        dtype=settings.take("dtype", str, "float32"),
    )
    settings.finish()
    return config


def embed(config: Config, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E]."""
    return params.embed[inputs.token_ids]


def layers(
    config: Config, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers `first` to `last` on x, [T, E]; there are no extras."""
    last = config.num_hidden_layers if last is None else last
    turn, caches = rotation(config.rope, inputs), []
    layer = jax.jit(functools.partial(_layer, config, ops))
    for w, cache in zip(params.layers[first:last], kv, strict=True):
        x, cache = layer(x, w, cache, turn)
        caches.append(cache)
    if last == config.num_hidden_layers:
        _, x = ops.add_norm(x, jnp.zeros_like(x), params.norm, config.eps)
    return x, tuple(caches), {}


def logits(config: Config, params: Params, hidden: Array) -> Array:
    """Scores every token of the vocabulary."""
    return params.head.product(hidden)


def _layer(
    config: Config, ops: Ops, x: Array, w: Layer, cache: Any, turn: tuple[Array, Array]
) -> tuple[Array, Any]:
    nothing, spec = jnp.zeros_like(x), AttentionSpec(0, None, config.head_dim**-0.5)
    _, h = ops.add_norm(x, nothing, w.attn_norm, config.eps)
    q, k, v = (ops.linear(h, part) for part in (w.q, w.k, w.v))
    out, cache = ops.attend(_turned(q, *turn), _turned(k, *turn), v, cache, spec)
    # The norm of a residual alone, which may come in parts.
    _, out = ops.add_norm(nothing, ops.project(out, w.o), w.attn_end_norm, config.eps)
    x, h = ops.add_norm(x, out, w.mlp_norm, config.eps)
    _, out = ops.add_norm(nothing, ops.mlp(h, w.gate_up, w.down), w.mlp_end_norm, config.eps)
    return x + out, cache


def _turned(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first dimensions of each head, two neighbours at a time. x: [T, H, D]."""
    turned = 2 * cos.shape[-1]
    pairs = x[..., :turned].astype(jnp.float32).reshape(*x.shape[:2], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    new = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(*x.shape[:2], turned)
    return jnp.concatenate([new.astype(x.dtype), x[..., turned:]], -1)


def sources(config: Config) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    V, E = config.vocab_size, config.hidden_size
    return host_value(
        Params,
        embed=_source("model.embed_tokens.weight", (V, E)),
        norm=_source("model.norm.weight", (E,)),
        head=host_value(Linear, weight=_source("lm_head.weight", (V, E)), bias=None),
        layers=tuple(_layer_sources(config, i) for i in range(config.num_hidden_layers)),
    )


def _layer_sources(c: Config, i: int) -> Layer:
    E, F, D, at = c.hidden_size, c.intermediate_size, c.head_dim, f"model.layers.{i}."

    def norm(name: str) -> Source:
        return _source(f"{at}{name}_layernorm.weight", (E,))

    def linear(name: str, outputs: tuple[int, ...], inputs: tuple[int, ...], bias: bool = False):
        name, held, axes = at + name, (*outputs, *inputs), len(inputs)
        flat = int(np.prod(outputs)), int(np.prod(inputs))
        weight = _source(f"{name}.weight", flat, held)
        offset = _source(f"{name}.bias", flat[:1], outputs) if bias else None
        return host_value(Linear, weight=weight, bias=offset, num_in=axes)

    return host_value(
        Layer,
        attn_norm=norm("input"),
        q=linear("self_attn.q_proj", (c.num_heads, D), (E,), c.bias),
        k=linear("self_attn.k_proj", (c.num_kv_heads, D), (E,), c.bias),
        v=linear("self_attn.v_proj", (c.num_kv_heads, D), (E,), c.bias),
        o=linear("self_attn.o_proj", (E,), (c.num_heads, D)),
        attn_end_norm=norm("post_self_attn"),
        mlp_norm=norm("post_attention"),
        gate_up=linear("mlp.gate_up_proj", (2, F), (E,)),
        down=linear("mlp.down_proj", (E,), (F,)),
        mlp_end_norm=norm("post_mlp"),
    )


def _source(name: str, shape: tuple[int, ...], held: tuple[int, ...] = ()) -> Source:
    """A tensor that is one weight, which may be `held` in another shape."""
    held = held or shape
    return Source((name,), (shape,), lambda a: a[0].reshape(held), lambda a: [a.reshape(shape)])


glm4 = Model(read, Params, embed, layers, logits, sources)
