"""Mamba-2 mixers: a short convolution, a state space and a gated norm. arXiv:2405.21060."""

from collections.abc import Sequence
from dataclasses import dataclass
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.caches.state import ConvParts, RecurrentState
from jaxrunner.hf_config import Settings
from jaxrunner.linear import Linear
from jaxrunner.model import Ops, Source
from jaxrunner.models.hybrids.hybrid import read_state_dtype
from jaxrunner.models.sources import (
    by_groups,
    conv_source,
    joined_source,
    packed_source,
    product_source,
)
from jaxrunner.ops.states.state_space import StateSpaceInputs, state_space
from jaxrunner.pytree import leaf, nested, pytree
from jaxrunner.types import Array

INFINITY = {"__float__": "Infinity"}  # as transformers writes it


@dataclass(frozen=True)
class MixerConfig:
    """Sizes of a Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int  # of heads that share b and c
    state_size: int
    conv_width: int
    conv_bias: bool
    bias: bool  # of its products
    time_step_limit: tuple[float, float]
    state_dtype: str
    norm: str = "behind gate"  # or "before gate", or "" for none
    scales: tuple[float, ...] = ()  # of gates, x, b, c and steps, before the convolution; () for 1
    into: float = 1.0  # scale of what it reads

    @property
    def inner(self) -> int:
        """Numbers of a token in all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Numbers of a token that the convolution reads: x, b and c."""
        return self.inner + 2 * self.groups * self.state_size

    @property
    def parts(self) -> tuple[int, ...]:
        """Numbers of a token in one group that are gates, x, b, c and steps."""
        inner = self.inner // self.groups
        return inner, inner, self.state_size, self.state_size, self.heads // self.groups

    @property
    def state(self) -> RecurrentState:
        """The recurrent state that a layer keeps of a request."""
        matrices = self.heads, self.head_dim, self.state_size
        return RecurrentState(
            taps=self.conv_width - 1, channels=self.channels, matrices=matrices,
            inputs=self.inner + self.groups * self.state_size + self.heads,  # x, b and decays
            dtype=self.state_dtype,
        )  # fmt: skip

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return dict(
            mix_groups=self.groups, mixed=sum(self.parts), channels=self.channels // self.groups,
            conv_width=self.conv_width, normed=self.inner // self.groups, inner=self.inner,
            mixer_heads=self.heads, conv_bias=self.conv_bias, mixer_bias=self.bias,
            mixer_norm=bool(self.norm),
        )  # fmt: skip


@pytree
class Mixer:
    """Weights of a Mamba-2 mixer; of several devices each has some of the groups, or all."""

    mix_in: Linear = nested(outputs="mix_groups mixed", inputs="E", bias="mixer_bias")
    conv_weight: Array = leaf("mix_groups channels conv_width", "param")
    conv_offset: Array | None = leaf("mix_groups channels", "param", when="conv_bias")
    step_offset: Array = leaf("mixer_heads", jnp.float32)
    log_rate: Array = leaf("mixer_heads", jnp.float32)
    skip: Array = leaf("mixer_heads", jnp.float32)
    mix_norm: Array | None = leaf("mix_groups normed", "param", when="mixer_norm")
    mix_out: Linear = nested(outputs="E", inputs="inner", bias="mixer_bias")

    def mix(self, config: Any, ops: Ops, h: Array, cache: Any, group: int) -> tuple[Array, Any]:
        """Returns what the mixer adds to the residual, given h, [T, E]; and the cache.

        config: has the sizes as `mixer`.
        """
        m, T, f32 = config.mixer, h.shape[0], jnp.float32
        heads, G, inner = self.log_rate.shape[0], self.conv_weight.shape[0], m.parts[0]
        mixed = ops.linear(h * m.into, self.mix_in)
        if m.scales:
            mixed *= jnp.asarray(np.repeat(m.scales, m.parts), h.dtype)[None, None]
        gate, step = mixed[..., :inner], mixed[..., sum(m.parts[:-1]) :]
        weights, parts = (self.conv_weight, self.conv_offset), ConvParts(inner, m.parts[1:-1])
        (x, b, c), cache = ops.convolve(mixed, *weights, cache, group, parts)
        x = x.reshape(T, heads, -1)
        step = jax.nn.softplus(step.reshape(T, heads).astype(f32) + self.step_offset[None])
        step = jnp.clip(step, *m.time_step_limit)
        decay = -jnp.exp(self.log_rate)[None] * step
        inputs = StateSpaceInputs(x * step[:, :, None], decay, b, c)
        rule = state_space(heads, m.head_dim, m.state_size)
        y, cache = ops.recur(rule, inputs, cache, group)
        y = (y + self.skip[None, :, None] * x).reshape(T, G, -1)
        y = self._gated(m, y, jax.nn.silu(gate.astype(f32)), config.rms_norm_eps)
        return ops.project(y.reshape(T, -1).astype(h.dtype), self.mix_out), cache

    def _gated(self, m: MixerConfig, y: Array, gate: Array, eps: float) -> Array:
        """Returns y times its gate, normed by groups. y and gate: [T, groups, ...], float32."""
        if self.mix_norm is None:
            return y * gate
        first = y * gate if m.norm == "behind gate" else y
        scale = jax.lax.rsqrt((first * first).mean(-1, keepdims=True) + eps)
        normed = (first * scale).astype(self.mix_norm.dtype) * self.mix_norm[None]
        return normed if m.norm == "behind gate" else normed.astype(gate.dtype) * gate


def read_mixer(settings: Settings, inner: int = 0) -> MixerConfig:
    """Reads the sizes of mixers, under the names that Bamba gave them.

    inner: numbers of a token in all heads; 0 where the config says how many times the hidden size.

    Raises:
      ValueError: heads that cannot be.
    """
    times = settings.size("mamba_expand", 2)
    inner = inner or times * settings.size("hidden_size")
    heads, groups = settings.size("mamba_n_heads", 128), settings.size("mamba_n_groups", 1)
    given = settings.take("mamba_d_head", (int, str), "auto")
    head_dim = inner // heads if given == "auto" else given
    if heads * head_dim != inner or heads % groups:
        raise ValueError(
            f"mamba_n_heads={heads} heads of mamba_d_head={head_dim} must be {inner} numbers, "
            f"in mamba_n_groups={groups} equal groups: correct config.json"
        )
    limits = settings.take("time_step_limit", (list, tuple), (0.0, math.inf))
    settings.ignore("mamba_chunk_size", "time_step_floor", "time_step_max", "time_step_min",
                    "time_step_rank")  # fmt: skip
    return MixerConfig(
        heads, head_dim, groups, settings.size("mamba_d_state", 256),
        settings.size("mamba_d_conv", 4), settings.take("mamba_conv_bias", bool, True),
        settings.take("mamba_proj_bias", bool, False), _read_limits(limits),
        read_state_dtype(settings),
    )  # fmt: skip


def _read_limits(given: Sequence[Any]) -> tuple[float, float]:
    """Returns the least and the most of a step, of which JSON may have a name: `INFINITY`."""
    found = tuple(math.inf if one == INFINITY else one for one in given)
    if len(found) != 2 or not all(type(one) in (int, float) for one in found):
        raise ValueError(f"time_step_limit must be two numbers, got {shown(given)}")
    return float(found[0]), float(found[1])


def mixer_sources(m: MixerConfig, prefix: str, hidden: int) -> dict[str, Any]:
    """Returns where the fields of a `Mixer` lie, by their names; those of tensors begin alike."""
    mixed = {f"{prefix}in_proj": m.inner + m.channels + m.heads}
    rows, channels = (
        functools.partial(by_groups, m.groups, parts) for parts in (m.parts, m.parts[1:-1])
    )
    offset, normed = ((m.channels,),), (m.groups, m.inner // m.groups)
    of_heads = dict(step_offset="dt_bias", log_rate="A_log", skip="D")
    return dict(
        mix_in=packed_source(mixed, rows, hidden, bias=m.bias),
        conv_weight=conv_source(f"{prefix}conv1d", m.channels, m.conv_width, channels),
        conv_offset=(
            joined_source((f"{prefix}conv1d.bias",), offset, channels) if m.conv_bias else None
        ),
        mix_norm=Source.whole(f"{prefix}norm.weight", m.inner, held=normed) if m.norm else None,
        mix_out=product_source(f"{prefix}out_proj", hidden, m.inner, bias=m.bias),
    ) | {field: Source.whole(prefix + name, m.heads) for field, name in of_heads.items()}
