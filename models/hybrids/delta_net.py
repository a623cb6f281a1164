"""Gated delta nets: a short convolution, a delta rule and a gated norm. arXiv:2412.06464."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner.caches.state import ConvParts, RecurrentState
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import Ops
from jaxrunner.models.hybrids.hybrid import read_state_dtype
from jaxrunner.ops.plain import rms_norm
from jaxrunner.ops.states.delta_rule import DeltaRuleInputs, delta_rule
from jaxrunner.pytree import leaf, nested, pytree
from jaxrunner.types import Array


@dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of a gated delta net; groups of value heads share a query and a key."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int
    state_dtype: str

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution reads: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        """Numbers of a token's values in all heads."""
        return self.value_heads * self.value_dim

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of a token in one group that are its query, key, values and gates."""
        values = self.inner // self.key_heads
        return self.key_dim, self.key_dim, values, values

    @property
    def state(self) -> RecurrentState:
        """The recurrent state that a layer keeps of a request."""
        matrices = self.value_heads, self.key_dim, self.value_dim
        return RecurrentState(
            taps=self.conv_width - 1, channels=self.channels, matrices=matrices,
            inputs=self.key_heads * self.key_dim + self.inner + 2 * self.value_heads,
            dtype=self.state_dtype,
        )  # fmt: skip

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return dict(
            mix_groups=self.key_heads, mixed=sum(self.parts), channels=sum(self.parts[:-1]),
            conv_width=self.conv_width, inner=self.inner, value_dim=self.value_dim,
            mixer_heads=self.value_heads, rates=2,
        )  # fmt: skip


@pytree
class DeltaNet:
    """Weights of a gated delta net; of several devices each has some of the groups, or all."""

    mix_in: Linear = nested(outputs="mix_groups mixed", inputs="E")  # query, key, values, gates
    rates: Linear = nested(outputs="rates mixer_heads", inputs="E")  # of what is moved, of decay
    conv_weight: Array = leaf("mix_groups channels conv_width", "param")
    step_offset: Array = leaf("mixer_heads", jnp.float32)
    log_rate: Array = leaf("mixer_heads", jnp.float32)
    mix_norm: Array = leaf("value_dim", "param")
    mix_out: Linear = nested(outputs="E", inputs="inner")

    def mix(self, config: Any, ops: Ops, h: Array, cache: Any, group: int) -> tuple[Array, Any]:
        """Returns what the net adds to the residual, given h, [T, E]; and the cache.

        config: has the sizes as `mixer`.
        """
        m, T, f32 = config.mixer, h.shape[0], jnp.float32
        heads, keys = self.log_rate.shape[0], m.key_dim
        mixed = ops.linear(h, self.mix_in)
        parts = ConvParts(0, m.parts[:-1], l2_norms=(keys**-0.5, 1.0))
        (q, k, v), cache = ops.convolve(mixed, self.conv_weight, None, cache, group, parts)
        rates = ops.linear(h, self.rates).astype(f32)
        decay = jax.nn.softplus(rates[:, 1] + self.step_offset[None])
        inputs = DeltaRuleInputs(
            q=q, k=k, v=v.reshape(T, heads, -1),
            decay=-jnp.exp(self.log_rate)[None] * decay, beta=jax.nn.sigmoid(rates[:, 0]),
        )  # fmt: skip
        rule = delta_rule(heads, keys, m.value_dim)
        out, cache = ops.recur(rule, inputs, cache, group)
        out = rms_norm(out.astype(h.dtype), self.mix_norm, config.rms_norm_eps).reshape(T, -1)
        gate = jax.nn.silu(mixed[..., sum(m.parts[:-1]) :].reshape(T, -1).astype(f32))
        out = (out.astype(f32) * gate).astype(h.dtype)
        return ops.project(out, self.mix_out), cache


def read_delta_net(settings: Settings) -> DeltaNetConfig:
    """Reads the sizes of gated delta nets, under Qwen's names.

    Raises:
      ValueError: heads that cannot be shared.
    """
    heads = settings.size("linear_num_key_heads", 16), settings.size("linear_num_value_heads", 32)
    if heads[1] % heads[0]:
        raise ValueError(
            f"linear_num_value_heads={heads[1]} must be a multiple of "
            f"linear_num_key_heads={heads[0]}: correct config.json"
        )
    return DeltaNetConfig(
        *heads, settings.size("linear_key_head_dim", 128),
        settings.size("linear_value_head_dim", 128), settings.size("linear_conv_kernel_dim", 4),
        read_state_dtype(settings),
    )  # fmt: skip
