"""Rotary position embeddings and their length scalings."""

from dataclasses import dataclass
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.types import Array, Inputs

Scaled: TypeAlias = tuple[np.ndarray, dict[str, Any]]  # frequencies, and the rest of a `Rope`


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling that grows with the sequence once it passes `max_len` tokens."""

    theta: float
    factor: float
    max_len: int


@dataclass(frozen=True)
class Rope:
    """Angles a position turns each pair of dimensions by, and what scales sine and cosine."""

    inv_freq: tuple[float, ...]  # [D / 2], radians a token
    scale: float = 1.0
    dynamic: Dynamic | None = None


def rotation(rope: Rope, inputs: Inputs) -> tuple[Array, Array]:
    """Returns cosine and sine of every token's angles, each [T, 1, D / 2], float32."""
    inv_freq = jnp.asarray(rope.inv_freq, jnp.float32)[None]
    if rope.dynamic is not None:
        inv_freq = _stretched(rope.dynamic, inputs.rope_len, 2 * len(rope.inv_freq), inv_freq)
    angle = (inputs.positions.astype(jnp.float32)[:, None] * inv_freq)[:, None]
    turn = jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale
    here, elsewhere = _materialized, lambda _, *turn: turn
    return jax.lax.platform_dependent(inputs.positions, *turn, cpu=here, default=elsewhere)


def _materialized(positions: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
    """Returns the angles, which XLA then computes once.

    On a CPU it would fuse them into their readers and compute them for each layer and head; it
    fuses nothing into a conditional, but ignores `optimization_barrier`.
    """
    return jax.lax.cond(
        positions[0] >= 0, lambda: (cos, sin), lambda: (jnp.zeros_like(cos), jnp.zeros_like(sin))
    )


def _stretched(dynamic: Dynamic, rope_len: Array, dim: int, inv_freq: Array) -> Array:
    """Returns each token's frequencies, [T, D / 2], with the base grown for its length."""
    over = jnp.maximum(rope_len, dynamic.max_len).astype(jnp.float32) / dynamic.max_len
    growth = dynamic.factor * over - (dynamic.factor - 1)
    base = dynamic.theta * growth ** (dim / (dim - 2))
    stretched = base[:, None] ** -(jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)[None]
    return jnp.where(rope_len[:, None] > dynamic.max_len, stretched, inv_freq)


def read_rope(
    settings: Settings, head_dim: int, max_len: int, partial: float | None = None
) -> Rope:
    """Reads `rope_parameters` (new style) or `rope_theta` and `rope_scaling` (old style).

    partial: the share of a head that the family rotates if none is set; None where it must be all
    of it. What is not rotated turns by 0.

    Raises:
      ValueError: a scaling that is unknown or lacks a parameter.
    """
    theta = settings.take("rope_theta", float, 10000.0)
    scaling = settings.section("rope_scaling")
    scaling = settings.section("rope_parameters") or scaling or Settings({}, key="rope_scaling")
    theta = scaling.take("rope_theta", float, theta)
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    whole_dim, head_dim = head_dim, _rotary_dim(settings, scaling, head_dim, partial)
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary positions turn pairs")
    if theta <= 1:
        raise ValueError(f"rope_theta must be over 1, got {theta}")
    if kind not in SCALINGS:
        raise ValueError(f"rope_type must be one of {sorted(SCALINGS)}, got {kind!r}")
    # In float32, as models were trained: at long positions the last bit shows.
    inv_freq = 1 / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)
    inv_freq, rest = SCALINGS[kind](scaling, inv_freq, theta, max_len)
    scaling.finish()
    inv_freq = np.pad(inv_freq, (0, (whole_dim - head_dim) // 2))
    return Rope(tuple(float(np.float32(f)) for f in inv_freq), **rest)


def _rotary_dim(settings: Settings, scaling: Settings, head_dim: int, partial: float | None) -> int:
    """Returns how many dimensions of a head are rotated."""
    name = "partial_rotary_factor"
    if partial is None:
        settings.expect(name, 1.0, 1)
        scaling.expect(name, 1.0, 1)
        return head_dim
    share = scaling.take(name, float, settings.take(name, float, partial))
    if not 0 < share <= 1:
        raise ValueError(f"{name} must be over 0 and at most 1, got {share}")
    return int(head_dim * share)


def _default(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    return inv_freq, {}


def _linear(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    return inv_freq / _factor(scaling), {}


def _dynamic(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """NTK-aware interpolation with a base that follows the length, as Hugging Face defines it."""
    scaling.expect("original_max_position_embeddings", max_len)  # Hugging Face ignores it
    return inv_freq, {"dynamic": Dynamic(theta, _factor(scaling), max_len)}


def _llama3(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """Llama 3.1: long wavelengths are slowed, short ones kept, those between blended."""
    factor = _factor(scaling)
    low, high = (scaling.take(f"{end}_freq_factor", float) for end in ("low", "high"))
    if not 0 < low < high:
        raise ValueError(f"low_freq_factor={low} must be over 0 and below high_freq_factor={high}")
    turns = scaling.size("original_max_position_embeddings") * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return inv_freq * (kept + (1 - kept) / factor), {}


def _yarn(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """YaRN. arXiv:2309.00071."""
    dim, factor = 2 * len(inv_freq), _factor(scaling)
    old_len = scaling.size("original_max_position_embeddings", max_len)

    def dim_of(turns: float) -> float:
        return dim * math.log(old_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dim_of(scaling.take("beta_fast", float, 32.0))
    high = dim_of(scaling.take("beta_slow", float, 1.0))
    if scaling.take("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)

    def gain(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, mscale_all = (scaling.take(k, float, 0.0) for k in ("mscale", "mscale_all_dim"))
    usual = gain(mscale) / gain(mscale_all) if mscale and mscale_all else gain(1.0)
    scale = scaling.take("attention_factor", float, usual)
    return inv_freq * ((1 - slowed) + slowed / factor), {"scale": scale}


def _factor(scaling: Settings) -> float:
    factor = scaling.take("factor", float)
    if factor < 1:
        raise ValueError(f"factor of the rope scaling must be at least 1, got {factor}")
    return factor


SCALINGS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
