"""Mixtures of experts: Llama's layers, of which some send each token to a few of many MLPs.

Flags of the config cover the families that differ by a router, a shared expert or dense layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Experts, Routes
from jaxrunner.model import Model, Ops, Source
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import Attention, attention_sources
from jaxrunner.models.sources import linear_source, mlp_sources
from jaxrunner.ops.plain import summed
from jaxrunner.ops.routing import Router, RouterConfig, scores_of
from jaxrunner.pytree import each, host_value, leaf, nested, pytree
from jaxrunner.types import Array

Join = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """A decoder, and the experts of its layers. `intermediate_size` is of layers without."""

    router: RouterConfig
    moe_intermediate_size: int
    sparse: tuple[bool, ...]  # which layers have experts
    shared_expert_intermediate_size: int = 0  # of the MLP that all tokens go through; 0 for none
    shared_expert_gate: bool = False  # whether a gate of its own scales it
    expert_bias: bool = False
    router_bias: bool = False
    choice_bias: bool = False

    @property
    def concurrent_kernels(self) -> bool:
        """Whether kernels of a step may run at once: a shared expert's and the choice of others."""
        return self.shared_expert_intermediate_size > 0

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`; flags of layers are with each of them."""
        shared, r = self.shared_expert_intermediate_size, self.router
        of_layer = tuple(
            dict(dense=not sparse, sparse=sparse, shared=sparse and shared > 0,
                 shared_gate=sparse and self.shared_expert_gate)
            for sparse in self.sparse
        )  # fmt: skip
        return super().dims | dict(
            Y=of_layer, experts=r.num_experts, candidates=r.num_experts,
            expert_units=self.moe_intermediate_size, expert_inputs=self.hidden_size,
            shared_units=shared, one=1,
            expert_bias=self.expert_bias, router_bias=self.router_bias,
            choice_bias=self.choice_bias, routes=r.num_experts_per_tok,
        )  # fmt: skip


@pytree
class FeedForward:
    """Weights of a layer behind its attention: of an MLP, or of experts and what chooses them."""

    gate_up: Linear | None = nested(outputs="gate_up F", inputs="E", bias="mlp_bias", when="dense")
    down: Linear | None = nested(outputs="E", inputs="F", bias="mlp_bias", when="dense")
    router: Router | None = nested(
        X="candidates", bias="router_bias", choice_bias="choice_bias", when="sparse"
    )
    experts: Experts | None = nested(X="experts", F="expert_units", when="sparse")
    shared_gate_up: Linear | None = nested(
        outputs="gate_up shared_units", inputs="E", when="shared"
    )
    shared_down: Linear | None = nested(outputs="E", inputs="shared_units", when="shared")
    shared_gate: Linear | None = nested(outputs="one", inputs="E", when="shared_gate")

    def feed_forward(self, config: Any, ops: Ops, h: Array) -> tuple[Array, dict[str, Array]]:
        """Returns what the MLP or the experts add to the residual, given h, [T, E]; and extras.

        Of a layer with experts these are `router_logits`, [T, X], and `routed_experts`, [T, k].
        """
        if self.gate_up is not None and self.down is not None:
            return ops.mlp(h, self.gate_up, self.down), {}
        assert self.router is not None
        logits = scores_of(self.router, h)
        routes = ops.route(config.router, self.router, logits)
        told = dict(router_logits=logits, routed_experts=routes.experts)
        residual = self.run_experts(ops, h, routes)
        if self.shared_gate_up is None or self.shared_down is None:
            return residual, told
        weights = self.shared_gate_up, self.shared_down
        shared = summed(ops.mlp(h, *weights, beside_experts=True), jnp.float32)
        if self.shared_gate is not None:
            gate = jax.nn.sigmoid(ops.plain_linear(h, self.shared_gate).astype(jnp.float32))
            shared *= jnp.broadcast_to(gate, shared.shape)
        return (summed(residual, jnp.float32) + shared).astype(h.dtype), told

    def run_experts(self, ops: Ops, h: Array, routes: Routes) -> Array:
        """Returns what its experts add to the residual, given h, [T, E]."""
        assert self.experts is not None
        return ops.experts(h, routes, self.experts)


@pytree
class MixtureLayer(FeedForward, Attention):
    """Weights of one layer."""


@pytree
class Params:
    """Weights of a mixture."""

    embed: Array = leaf("V E", "param")
    norm: Array = leaf("E", "param")
    head: Linear | None = nested(outputs="V", inputs="E", when="untied")
    layers: tuple[MixtureLayer, ...] = each("Y")


def read_mixture(
    settings: Settings, router: RouterConfig, *, units: str = "moe_intermediate_size",
    sparse: tuple[bool, ...] = (), kind: Callable[..., Any] = MixtureConfig, head_dim: int = 0,
    partial_rotary: float | None = None, **flags: Any,
) -> Any:  # fmt: skip
    """Reads what all mixtures have in common; `flags` are the family's own fields.

    units: the setting that has the size of an expert. sparse: which layers have experts, all where
    empty. kind: the class of the config.

    Raises:
      ValueError: a router that cannot be.
    """
    layers, size = settings.size("num_hidden_layers"), settings.size(units)
    _check_router(router)
    dense = read_decoder(settings, head_dim=head_dim, partial_rotary=partial_rotary)
    sparse = sparse or (True,) * layers
    own = dict(router=router, moe_intermediate_size=size, sparse=sparse)
    if all(sparse):  # no layer has an MLP of the other size
        own |= dict(intermediate_size=size)
    return kind(**vars(dense) | own | flags)


def read_router(settings: Settings, *names: str, **flags: Any) -> RouterConfig:
    """Reads the sizes of a router; names: of the setting that counts experts, the first that is."""
    count = next((name for name in names if name in settings), names[0])
    chosen = settings.size("num_experts_per_tok")
    return RouterConfig(settings.size(count), chosen, **flags)


def read_balanced_router(
    settings: Settings, *names: str, groups: int = 1, best: int = 1
) -> RouterConfig:
    """Reads a router of sigmoids, balanced by a bias; `groups` and the `best` of them by default.

    names: as of `read_router`.
    """
    return read_router(
        settings,
        *names,
        scoring="sigmoid",
        norm_topk_prob=settings.take("norm_topk_prob", bool, True),
        n_group=settings.size("n_group", groups),
        topk_group=settings.size("topk_group", best),
        routed_scaling_factor=settings.take("routed_scaling_factor", float, 1.0),
    )


def _check_router(router: RouterConfig) -> None:
    X, k, n, top = router.num_experts, router.num_experts_per_tok, router.n_group, router.topk_group
    if X % n or not 1 <= top <= n or not 1 <= k <= X // n * top:
        raise ValueError(
            f"num_experts_per_tok={k} experts must be of topk_group={top} groups, of n_group={n} "
            f"equal groups of {X} experts: correct config.json"
        )


def sources(
    config: MixtureConfig, of_experts: Callable[..., dict[str, Any]], params: type = Params,
    layer: type = MixtureLayer, of_attention: Callable[..., dict[str, Any]] = attention_sources,
) -> Any:  # fmt: skip
    """Returns where each weight lies in a Hugging Face checkpoint.

    of_experts: (config, prefix of a layer) -> the sources of the fields that a layer has more than
    an MLP. of_attention: (config, prefix, width that is read) -> those before the MLP.
    """
    c, E = config, config.hidden_size
    names = [f"model.layers.{i}." for i in range(c.num_hidden_layers)]
    none = dict.fromkeys(("gate_up", "down", *OF_EXPERTS))

    def one(prefix: str, sparse: bool) -> Any:
        dense = functools.partial(mlp_sources, f"{prefix}mlp.", c.intermediate_size, E)
        own = of_experts(c, prefix) if sparse else dense(bias=c.mlp_bias)
        return host_value(layer, **none | of_attention(c, prefix, E) | own)

    outside = llama.outer_sources(c)
    return host_value(params, **outside, layers=tuple(map(one, names, c.sparse)))


OF_EXPERTS = ("router", "experts", "shared_gate_up", "shared_down", "shared_gate")


def router_source(c: MixtureConfig, name: str) -> Router:
    """Returns the sources of a router whose tensors' names begin with `name`."""
    X = c.router.num_experts
    return host_value(
        Router,
        weight=Source.whole(f"{name}.weight", X, c.hidden_size),
        bias=Source.whole(f"{name}.bias", X) if c.router_bias else None,
        choice_bias=Source.whole(f"{name}.e_score_correction_bias", X) if c.choice_bias else None,
        replayed=None,
    )


def stacked_source(c: MixtureConfig, prefix: str, gate: str, up: str, down: str) -> Experts:
    """Returns the sources of experts that have a tensor each: `prefix`, its number, and a name."""
    X, F, E = c.router.num_experts, c.moe_intermediate_size, c.hidden_size
    each = [f"{prefix}{i}." for i in range(X)]
    pairs = tuple(f"{one}{name}.weight" for one in each for name in (gate, up))
    gate_up = Source(
        pairs, ((F, E),) * 2 * X, lambda a: np.stack(a).reshape(X, 2, F, -1),
        lambda a: [*a.reshape(2 * X, F, E)],
    )  # fmt: skip
    downs = tuple(f"{one}{down}.weight" for one in each)
    return host_value(
        Experts,
        gate_up=gate_up,
        down=Source(downs, ((E, F),) * X, np.stack, list),
        gate_up_bias=None,
        down_bias=None,
        activation="swiglu",
    )


def qwen_experts(c: MixtureConfig, prefix: str, *, shared: str = "shared_expert") -> dict[str, Any]:
    """Returns the sources of experts as Qwen's checkpoints, and those like them, name them."""
    mlp = f"{prefix}mlp."
    found: dict[str, Any] = dict(
        router=router_source(c, f"{mlp}gate"),
        experts=stacked_source(c, f"{mlp}experts.", "gate_proj", "up_proj", "down_proj"),
    )
    if units := c.shared_expert_intermediate_size:
        made = mlp_sources(f"{mlp}{shared}.", units, c.hidden_size)
        found |= {f"shared_{name}": source for name, source in made.items()}
    if c.shared_expert_gate:
        gate = Source.whole(f"{mlp}shared_expert_gate.weight", 1, c.hidden_size)
        found["shared_gate"] = linear_source(gate)
    return found


mixture = Model(
    read_mixture, Params, llama.embed, llama.layers, llama.logits,
    functools.partial(sources, of_experts=qwen_experts), tensor_parallel=True,
)  # fmt: skip
