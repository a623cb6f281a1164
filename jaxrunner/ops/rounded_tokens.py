"""Tokens that come in fp8 from the norm before a product."""

from typing import Any

import jax.numpy as jnp

from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation
from jaxrunner.types import Array

ROUNDING = Activation("float8_e4m3fn", group=128)


@pytree
class RoundedTokens:
    """Stands for a norm, [T, E], that only products read which round it to fp8 by 128 terms.

    `Ops.linear` and `Ops.mlp` take it of the weights that `add_norm` was told as its readers, and
    ask it for its shape and dtype.
    """

    numbers: Array = leaf("T E", jnp.float8_e4m3fn)
    scale: Array = leaf("groups T", jnp.float32)
    dtype: Any = static()  # of the norm

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the norm."""
        return self.numbers.shape


@pytree
class PairedTokens:
    """Stands for a norm, [T, E], that only products read whose weights are held in fp8.

    Each number is the sum of two of fp8 times its token's scale (`fp8_pairs`).
    """

    numbers: Array = leaf("pair T E", jnp.float8_e4m3fn)
    scale: Array = leaf("T", jnp.float32)
    dtype: Any = static()  # of the norm

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the norm."""
        return self.numbers.shape[1:]


def told_readers(*weights: Any) -> dict[str, Any]:
    """Returns `readers` for `Ops.add_norm` where all may take its norm in fp8, else nothing.

    So an `add_norm` that knows no readers serves all other weights.
    """

    def in_fp8(w: Any) -> bool:
        if not isinstance(w, QuantizedLinear):
            return False
        given = w.scheme.activation
        return given == ROUNDING or (given is None and w.scheme.code == ROUNDING.code)

    return dict(readers=weights) if weights and all(map(in_fp8, weights)) else {}
