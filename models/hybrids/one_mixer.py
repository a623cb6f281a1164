"""Layers that are one mixer each: Mamba-2, attention without rotation, an MLP, or experts."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.linear import Linear
from jaxrunner.mixtures.experts import Experts
from jaxrunner.model import AttentionSpec, Ops
from jaxrunner.models import llama
from jaxrunner.models.hybrids.hybrid import Params
from jaxrunner.models.hybrids.mamba2 import Mixer
from jaxrunner.models.llama import Turn
from jaxrunner.ops.plain import summed, unpacked
from jaxrunner.ops.routing import Router, scores_of
from jaxrunner.pytree import leaf, nested, pytree
from jaxrunner.types import Array, Inputs


@pytree
class MambaLayer(Mixer):
    """Weights of a layer that is a mixer."""

    attn_norm: Array = leaf("E", "param")

    def run(
        self, config: Any, ops: Ops, h: Array, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any, dict[str, Array]]:
        """Returns what the layer adds to the residual, given h, [T, E]; the cache; and extras."""
        return *self.mix(config, ops, h, cache, spec.group), {}


@pytree
class AttentionLayer:
    """Weights of a layer that is attention."""

    attn_norm: Array = leaf("E", "param")
    qkv: Linear = nested(outputs="K P D", inputs="E")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2)

    def run(
        self, config: Any, ops: Ops, h: Array, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any, dict[str, Array]]:
        """Returns what the layer adds to the residual, given h, [T, E]; the cache; and extras."""
        out, cache = ops.attend(*unpacked(ops.linear(h, self.qkv)), cache, spec)
        return ops.project(out, self.o), cache, {}


@pytree
class MlpLayer:
    """Weights of a layer that is an MLP."""

    attn_norm: Array = leaf("E", "param")
    up: Linear = nested(outputs="F", inputs="E", bias="mlp_bias")
    down: Linear = nested(outputs="E", inputs="F", bias="mlp_bias")

    def run(
        self, config: Any, ops: Ops, h: Array, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any, dict[str, Array]]:
        """Returns what the layer adds to the residual, given h, [T, E]; the cache; and extras."""
        return _squared(ops, h, self.up, self.down), cache, {}


@pytree
class ExpertsLayer:
    """Weights of a layer of experts, beside an MLP of all tokens."""

    attn_norm: Array = leaf("E", "param")
    router: Router = nested(X="candidates", choice_bias="choice_bias")
    latent_in: Linear | None = nested(
        outputs="expert_inputs", inputs="E", bias="mlp_bias", when="latent"
    )
    experts: Experts = nested(X="experts", F="expert_units", E="expert_inputs", activation="relu2")
    latent_out: Linear | None = nested(
        outputs="E", inputs="expert_inputs", bias="mlp_bias", when="latent"
    )
    shared_up: Linear = nested(outputs="shared_units", inputs="E", bias="mlp_bias")
    shared_down: Linear = nested(outputs="E", inputs="shared_units", bias="mlp_bias")

    def run(
        self, config: Any, ops: Ops, h: Array, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any, dict[str, Array]]:
        """Returns what the layer adds to the residual, given h, [T, E]; the cache; and extras."""
        logits = scores_of(self.router, h)
        routes = ops.route(config.router, self.router, logits)
        x = h if self.latent_in is None else ops.linear(h, self.latent_in)
        x = summed(ops.experts(x, routes, self.experts), h.dtype)
        if self.latent_out is not None:
            x = ops.linear(x, self.latent_out)  # whole on each of several devices
        x += summed(_squared(ops, h, self.shared_up, self.shared_down), h.dtype)
        return x, cache, dict(router_logits=logits, routed_experts=routes.experts)


def _squared(ops: Ops, h: Array, up: Linear, down: Linear) -> Array:
    """Returns what an MLP gives of h, [T, E]. arXiv:2109.08668."""
    return ops.project(jnp.square(jax.nn.relu(ops.linear(h, up))), down)


def layers(
    config: Any, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs,
    ops: Ops, **which: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs layers as `llama.layers` does."""
    return llama.layers(config, params, x, kv, inputs, ops, layer=_layer, **which)


def _layer(
    config: Any, ops: Ops, x: Array, h: Array, w: Any, norm: Array, cache: Any,
    turn: Turn, *, spec: AttentionSpec,
) -> tuple[Array, Array, Any, dict[str, Array]]:  # fmt: skip
    """Runs a layer on h, the norm of x. Returns the next x, its norm, the cache, and extras."""
    residual, cache, told = w.run(config, ops, h, cache, spec)
    return *ops.add_norm(x, residual, norm, config.rms_norm_eps), cache, told
