"""Llama 4, texts: chunks in three layers of four, no rotation in the others, scaled experts.

Layers that see all tokens turn nothing, and their queries grow with the position. A token's score
scales what its expert reads. https://ai.meta.com/blog/llama-4-multimodal-intelligence
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.caches.chunked import ChunkedLocalAttention
from jaxrunner.caches.full import FullAttention
from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.model import AttentionSpec, Ops
from jaxrunner.models import llama
from jaxrunner.models.hybrids.hybrid import FULL
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    MixtureLayer,
    Params,
    mixture,
    read_mixture,
    read_router,
    router_source,
    sources,
)
from jaxrunner.models.partial_rotary import reordered_heads
from jaxrunner.models.rope import rotation
from jaxrunner.models.sources import mlp_sources, renamed, transposed_source
from jaxrunner.models.text_config import text_settings
from jaxrunner.ops.plain import rms_norm, rotate, unpacked
from jaxrunner.pytree import each, host_value, pytree, static
from jaxrunner.types import Array, Inputs

CHUNKED = "chunked_attention"
NAMES = {".mlp.": ".feed_forward."}
NAMES_OF_TWO = {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}
USUAL = dict(  # of transformers, where a config does not say
    rms_norm_eps=1e-5, head_dim=128, num_experts_per_tok=1, num_local_experts=16,
    attention_chunk_size=8192, floor_scale=8192, intermediate_size_mlp=16384,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Llama4Config(MixtureConfig):
    """A mixture, and what its layers see and turn."""

    attention_chunk_size: int
    chunked: tuple[bool, ...]  # which layers see their chunk alone
    turned: tuple[bool, ...]  # which layers rotate queries and keys
    use_qk_norm: bool  # of layers that rotate, behind the rotation, without weights
    query_growth: tuple[float, int] | None  # scale, len: q * (1 + scale ln(1 + (pos + 1) // len))

    @property
    def concurrent_kernels(self) -> bool:
        """Whether kernels of a step may run at once: not those of several experts of a token."""
        return super().concurrent_kernels and self.router.num_experts_per_tok == 1

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer: keys and values of all tokens, or of a chunk."""
        kinds = FullAttention(), ChunkedLocalAttention(self.attention_chunk_size)
        return tuple(kinds[chunked] for chunked in self.chunked)

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`; flags of layers are with each of them."""
        dims = super().dims
        flags = zip(dims["Y"], self.chunked, self.turned, strict=True)
        return dims | dict(Y=tuple(y | dict(chunked=c, turned=t) for y, c, t in flags))


@pytree
class Llama4Layer(MixtureLayer):
    """Weights of one layer."""

    chunked: bool = static(default=False)
    turned: bool = static(default=False)

    def attend(
        self, config: Llama4Config, ops: Ops, h: Array, turn: Any, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        cos, sin, growth = turn
        if self.chunked:
            spec = spec._replace(chunk_size=config.attention_chunk_size)
        q, k, v = unpacked(ops.linear(h, self.qkv))
        if self.turned:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        elif growth is not None:
            q = (q.astype(jnp.float32) * growth).astype(q.dtype)
        if self.turned and config.use_qk_norm:
            ones = jnp.ones(config.head_dim, h.dtype)
            q, k = (rms_norm(x, ones, config.rms_norm_eps) for x in (q, k))
        out, cache = ops.attend(q, k, v, cache, spec)
        return ops.project(out, self.o), cache

    def run_experts(self, ops: Ops, h: Array, routes: Routes) -> Array:
        """Returns what its experts add to the residual, given h, [T, E], which scores scale."""
        assert self.experts is not None
        added = []
        for j in range(routes.experts.shape[1]):  # one in all that are published
            one, scores = routes.experts[:, j : j + 1], routes.weights[:, j : j + 1]
            x = h * scores.astype(h.dtype)
            added.append(ops.experts(x, Routes(one, jnp.ones_like(scores)), self.experts))
        return sum(added[1:], added[0])


@pytree
class Llama4Params(Params):
    """Weights of the model."""

    layers: tuple[Llama4Layer, ...] = each("Y")


def layers(
    config: Llama4Config, params: Any, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers `first` to `last` as `llama.layers` does."""
    growth = None
    if config.query_growth is not None:
        scale, length = config.query_growth
        turns = ((inputs.positions + 1) // length).astype(jnp.float32)
        growth = (1 + scale * jnp.log1p(turns))[:, None, None]
    turn = *rotation(config.rope, inputs), growth
    return llama.layers(
        config, params, x, kv, inputs, ops, first=first, last=last, extras=extras, turn=turn
    )


def read(settings: Settings) -> Llama4Config:
    """Reads a Llama 4 config of its text model.

    Raises:
      ValueError: a setting that is not of all layers, or is not supported; names it.
    """
    theta = {} if "rope_parameters" in settings else dict(rope_theta=5e5)
    settings = settings.with_defaults(**USUAL, **theta)
    num, chunk = settings.size("num_hidden_layers"), settings.size("attention_chunk_size")
    every = settings.size("no_rope_layer_interval", 4)
    default = [int((i + 1) % every != 0) for i in range(num)]
    turned = (settings.each("no_rope_layers", int, default) or default)[:num]
    kinds = [CHUNKED if turns else FULL for turns in turned]
    kinds = settings.each("layer_types", str, kinds)
    if not len(turned) == len(kinds) == num or not set(kinds) <= {CHUNKED, FULL}:
        raise ValueError(
            f"layer_types must name {CHUNKED} or {FULL}, and no_rope_layers have a number, for "
            f"{num} layers, got {shown(kinds)} and {turned}"
        )
    step = settings.size("interleave_moe_layer_step", 1)
    bias = settings.take("attention_bias", bool, False)
    of_experts = settings.each("moe_layers", int, [*range(step - 1, num, step)])
    sparse = tuple(i in of_experts for i in range(num))
    own: dict[str, Any] = dict(
        attention_chunk_size=chunk,
        chunked=tuple(kind == CHUNKED for kind in kinds),
        turned=tuple(map(bool, turned)),
        use_qk_norm=settings.take("use_qk_norm", bool, True),
        query_growth=_read_growth(settings),
        shared_expert_intermediate_size=settings.size("intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
    )
    units = settings.size("intermediate_size_mlp")
    own |= {} if all(sparse) else dict(intermediate_size=units)
    router = read_router(settings, "num_local_experts", scoring="sigmoid")
    return read_mixture(
        settings, router, units="intermediate_size", sparse=sparse, kind=Llama4Config, **own
    )


def read_of_two(settings: Settings) -> Llama4Config:
    """Reads a Llama 4 config that has a vision tower beside the text model."""
    return read(text_settings(settings, tie_word_embeddings=False))


def _read_growth(settings: Settings) -> tuple[float, int] | None:
    # Published configs have a 4 for true.
    on = settings.take("attn_temperature_tuning", (bool, int), True)
    found = settings.take("attn_scale", float, 0.1), settings.size("floor_scale")
    return found if on else None


def _experts(c: Llama4Config, prefix: str) -> dict[str, Any]:
    at, X = f"{prefix}mlp.", c.router.num_experts
    F, E = c.moe_intermediate_size, c.hidden_size
    experts = host_value(
        Experts,
        gate_up=transposed_source(
            f"{at}experts.gate_up_proj",
            (X, 2 * F, E),
            lambda w: np.ascontiguousarray(w).reshape(X, 2, F, -1),
            lambda held: held.reshape(X, 2 * F, -1),
        ),
        down=transposed_source(f"{at}experts.down_proj", (X, E, F)),
        gate_up_bias=None,
        down_bias=None,
        activation="swiglu",
    )
    shared = mlp_sources(f"{at}shared_expert.", c.shared_expert_intermediate_size, E)
    found = {f"shared_{name}": source for name, source in shared.items()}
    return found | dict(router=router_source(c, f"{at}router"), experts=experts)


def _sources(c: Llama4Config) -> Any:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    made = sources(c, _experts, Llama4Params, Llama4Layer)
    layers = tuple(
        replace(reordered_heads(layer, c, neighbours=True), chunked=chunked, turned=turned)
        for layer, chunked, turned in zip(made.layers, c.chunked, c.turned, strict=True)
    )
    return renamed(replace(made, layers=layers), NAMES)


def _sources_of_two(c: Llama4Config) -> Any:
    return renamed(_sources(c), NAMES_OF_TWO)


llama4 = mixture._replace(read=read, params=Llama4Params, layers=layers, sources=_sources)
llama4_of_two = llama4._replace(
    read=read_of_two,
    sources=_sources_of_two,
    spare=("vision_model.", "multi_modal_projector."),
)
