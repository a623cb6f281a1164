"""Problems for the kernel of convolutions of rows that decode."""

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas.cases.case import Case
from jaxrunner.kernels_pallas.states.conv_step import conv_step
from jaxrunner.types import Array


def convs(B: int, C: int, *, biased: bool, taps: int = 3) -> Case:
    """B rows of C channels, each of which goes on from inputs that it writes over."""
    N = B + 1

    def make(seed: int) -> tuple[Array, ...]:
        keys = jax.random.split(jax.random.key(seed), 5)
        shapes = (N, taps, C), (B, C), (C, taps + 1), (C,)
        made = [
            jax.random.normal(key, shape, jnp.bfloat16)
            for key, shape in zip(keys, shapes, strict=False)
        ]
        place = jax.random.permutation(keys[4], N)[:B].astype(jnp.int32)
        return *made[: 3 + biased], place

    def run(conv: Array, x: Array, weight: Array, *rest: Array) -> tuple[Array, Array]:
        *bias, place = rest
        return conv_step(conv, x, weight, bias[0] if bias else None, place, place)

    name = f"{B} rows of {C}" + ", with a bias" * biased
    return Case("conv_step", name, make, run, 4.0 * B * C * (taps + 1), "TB/s", {})


# Of Granite 4 H Tiny and of Qwen3.5-9B.
CONVS = tuple(
    convs(B, C, biased=biased) for C, biased in ((3328, True), (8192, False)) for B in (8, 64)
)
