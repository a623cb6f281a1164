"""Rotary position embeddings and their length scalings."""

from dataclasses import dataclass
import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.config import read_scale
from jaxrunner.hf_config import Settings
from jaxrunner.types import Array, Inputs

OLD_LEN = "original_max_position_embeddings"
Scaled: TypeAlias = tuple[np.ndarray, dict[str, Any]]  # frequencies, and the rest of a `Rope`


@dataclass(frozen=True)
class Dynamic:
    """NTK-aware scaling that grows with the sequence once it passes `max_len` tokens."""

    theta: float
    factor: float
    max_len: int


@dataclass(frozen=True)
class Long:
    """The frequencies of sequences of more than `max_len` tokens. LongRoPE, arXiv:2402.13753."""

    inv_freq: tuple[float, ...]
    max_len: int


@dataclass(frozen=True)
class Rope:
    """Angles a position turns each pair of dimensions by, and what scales sine and cosine."""

    inv_freq: tuple[float, ...]  # of the pairs that are turned, radians a token
    scale: float = 1.0
    dynamic: Dynamic | None = None
    long: Long | None = None
    still: int = 0  # pairs behind them that are never turned

    def cache_salt(self, prompt_len: int) -> bytes:
        """Returns bytes that a prompt's turned keys depend on besides the tokens before them."""
        if self.dynamic is not None and prompt_len > self.dynamic.max_len:
            return prompt_len.to_bytes(8, "little")
        # Past `max_len` all of a prompt is turned otherwise, by whatever length.
        return b"long" if self.long is not None and prompt_len > self.long.max_len else b""


def rotation(rope: Rope, inputs: Inputs) -> tuple[Array, Array]:
    """Returns cosine and sine of every token's angles, each [T, 1, D / 2], float32."""
    if not rope.inv_freq:  # XLA's partitioner dies of an array without elements
        shape = *inputs.positions.shape, 1, rope.still
        return jnp.ones(shape), jnp.zeros(shape)
    inv_freq = jnp.asarray(rope.inv_freq, jnp.float32)[None]
    if rope.dynamic is not None:
        inv_freq = _stretched(rope.dynamic, inputs.rope_len, 2 * len(rope.inv_freq), inv_freq)
    if rope.long is not None:
        long = jnp.asarray(rope.long.inv_freq, jnp.float32)[None]
        inv_freq = jnp.where(inputs.rope_len[:, None] > rope.long.max_len, long, inv_freq)
    angle = (inputs.positions.astype(jnp.float32)[:, None] * inv_freq)[:, None]
    turn = jnp.cos(angle) * rope.scale, jnp.sin(angle) * rope.scale
    if rope.still:
        rest = (0, 0), (0, 0), (0, rope.still)
        turn = jnp.pad(turn[0], rest, constant_values=1), jnp.pad(turn[1], rest)
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


def no_rope(head_dim: int) -> Rope:
    """Returns the rotation of layers that turn nothing.

    Raises:
      ValueError: the size of heads is odd.
    """
    _check_even(head_dim)
    return Rope((), still=head_dim // 2)


def read_rope(
    settings: Settings, head_dim: int, max_len: int,
    *, turned: float | None = None, theta: float = 10000.0,
) -> Rope:  # fmt: skip
    """Reads `rope_parameters` (new style) or `rope_theta` and `rope_scaling` (old style).

    turned: the share of a head that is turned where the config does not say; None where a family
        turns whole heads. theta: the base where the config does not say.

    Raises:
      ValueError: a scaling that is unknown or lacks a parameter.
    """
    theta = settings.take("rope_theta", float, theta)
    scaling = settings.section("rope_scaling")
    scaling = settings.section("rope_parameters") or scaling or Settings({}, key="rope_scaling")
    if turned is None:
        settings.expect("partial_rotary_factor", 1.0, 1)
    else:
        turned = settings.take("partial_rotary_factor", float, turned)
        kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
        if (old_len := settings.size(OLD_LEN, 0, least=0)) and kind in (
            "llama3",
            "longrope",
            "yarn",
        ):
            scaling = scaling.with_value(OLD_LEN, old_len)  # the outer one counts
    return _rope_of(scaling, head_dim, max_len, turned, theta)


def read_two_ropes(
    settings: Settings, head_dim: int, max_len: int, *, theta: float, local: tuple[str, float]
) -> dict[str, Rope]:
    """Reads what layers turn by, by their kind, as `layer_types` names it.

    theta: the base of full layers where the config does not say. local: what an old config calls
        the base of layers with a window, which it does not scale, and its default.

    Raises:
      ValueError: as `read_rope`.
    """
    kinds, local_theta = (
        ("full_attention", "sliding_attention"),
        settings.take(local[0], float, local[1]),
    )
    both = settings.section("rope_parameters")
    if both is None or not any(kind in both for kind in kinds):
        full = read_rope(settings, head_dim, max_len, theta=theta)
        plain = _rope_of(Settings({}), head_dim, max_len, None, local_theta)
        return dict(zip(kinds, (full, plain), strict=True))
    ropes = {}
    for kind, default in zip(kinds, (theta, local_theta), strict=True):
        scaling = both.section(kind) or Settings({}, key=kind)
        ropes[kind] = _rope_of(scaling, head_dim, max_len, None, default)
    both.finish()
    return ropes


def _rope_of(
    scaling: Settings, head_dim: int, max_len: int, turned: float | None, theta: float
) -> Rope:
    """Reads one group of parameters. turned: as `read_rope` has it."""
    theta = scaling.take("rope_theta", float, theta)
    kind = scaling.take("rope_type", str, scaling.take("type", str, "default"))
    if turned is None:
        scaling.expect("partial_rotary_factor", 1.0, 1)
    share = scaling.take("partial_rotary_factor", float, 1.0 if turned is None else turned)
    _check_even(head_dim)
    if not 0 <= share <= 1 or (dim := int(head_dim * share)) % 2:
        raise ValueError(
            f"partial_rotary_factor={share} must be a share of head_dim={head_dim} of whole pairs"
        )
    if theta <= 1:
        raise ValueError(f"rope_theta must be over 1, got {theta}")
    if kind not in SCALINGS:
        raise ValueError(f"rope_type must be one of {sorted(SCALINGS)}, got {kind!r}")
    # In float32, as models were trained: at long positions the last bit shows.
    inv_freq = 1 / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    inv_freq, rest = SCALINGS[kind](scaling, inv_freq, theta, max_len)
    scaling.finish()
    return Rope(_floats(inv_freq), still=(head_dim - dim) // 2, **rest)


def _check_even(head_dim: int) -> None:
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary positions turn pairs")


def _floats(inv_freq: np.ndarray) -> tuple[float, ...]:
    return tuple(float(np.float32(f)) for f in inv_freq)


def _default(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    return inv_freq, {}


def _linear(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    return inv_freq / _factor(scaling), {}


def _dynamic(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """NTK-aware interpolation with a base that follows the length, as Hugging Face defines it."""
    scaling.expect(OLD_LEN, max_len)  # Hugging Face ignores it
    return inv_freq, {"dynamic": Dynamic(theta, _factor(scaling), max_len)}


def _llama3(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """Llama 3.1: long wavelengths are slowed, short ones kept, those between blended."""
    factor = _factor(scaling)
    low, high = (scaling.take(f"{end}_freq_factor", float) for end in ("low", "high"))
    if not 0 < low <= high:
        raise ValueError(
            f"low_freq_factor={low} must be over 0 and at most high_freq_factor={high}"
        )
    turns = scaling.size(OLD_LEN) * inv_freq / (2 * math.pi)
    # Of Llama 4 both are 1: there is nothing between.
    kept = np.clip((turns - low) / (high - low), 0, 1) if low < high else turns > low
    return inv_freq * (kept + (1 - kept) / factor), {}


def _yarn(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """YaRN. arXiv:2309.00071."""
    dim, factor = 2 * len(inv_freq), _factor(scaling)
    old_len = scaling.size(OLD_LEN, max_len)

    def dim_of(turns: float) -> float:
        return dim * math.log(old_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dim_of(read_scale(scaling, "beta_fast", 32.0))
    high = dim_of(read_scale(scaling, "beta_slow", 1.0))
    if scaling.take("truncate", bool, True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slowed = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)

    def gain(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0

    mscale, mscale_all = (scaling.take(k, float, 0.0) for k in ("mscale", "mscale_all_dim"))
    if min(mscale, mscale_all) < 0:
        raise ValueError(
            f"mscale={mscale} and mscale_all_dim={mscale_all} must be over 0, or 0 for none"
        )
    usual = gain(mscale) / gain(mscale_all) if mscale and mscale_all else gain(1.0)
    scale = read_scale(scaling, "attention_factor", usual)
    return inv_freq * ((1 - slowed) + slowed / factor), {"scale": scale}


def _longrope(scaling: Settings, inv_freq: np.ndarray, theta: float, max_len: int) -> Scaled:
    """LongRoPE: a factor for each pair, one set for short sequences and one for long ones."""
    pairs, old_len = len(inv_freq), scaling.size(OLD_LEN, max_len, least=2)
    factor = read_scale(scaling, "factor", max_len / old_len)
    gain = math.sqrt(1 + math.log(factor) / math.log(old_len)) if factor > 1 else 1.0
    sets = []
    for name in ("short_factor", "long_factor"):
        factors = scaling.take(name, list)
        numbers = all(type(f) in (int, float) and 1e-9 <= f <= 1e9 for f in factors)
        if len(factors) != pairs or not numbers:
            raise ValueError(f"{name} must be {pairs} factors of 1e-9 to 1e9, got {shown(factors)}")
        base = np.float32(theta) ** (np.arange(0, 2 * pairs, 2, dtype=np.float32) / (2 * pairs))
        sets.append(1 / (np.asarray(factors, np.float32) * base))
    long = Long(_floats(sets[1]), old_len)
    return sets[0], {"scale": read_scale(scaling, "attention_factor", gain), "long": long}


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
    "longrope": _longrope,
    "yarn": _yarn,
}
