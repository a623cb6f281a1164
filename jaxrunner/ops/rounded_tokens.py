"""Tokens that come from a norm as the product behind it wants them: in fp8, in another order."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp

from jaxrunner.linear import Weights
from jaxrunner.operation import Operation
from jaxrunner.pytree import leaf, pytree, static
from jaxrunner.quantization.quantized_linear import QuantizedLinear
from jaxrunner.quantization.scheme import Activation
from jaxrunner.types import Array

ROUNDING = Activation("float8_e4m3fn", group=128)


@pytree
class RoundedTokens:
    """Stands for a norm, [T, E], that only products read which round it to fp8 by 128 terms.

    `Ops.linear`, `project_qkv` and `mlp` take it of the weights that `add_norm` was told as its
    readers, and ask it for its shape and dtype.
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


@pytree
class BandedTokens:
    """Stands for a norm, [T, E], that only gates and what they gate read, held in fp8.

    Each number is the sum of two of fp8 times a scale of 128 terms, in bands of rows (`fp8_bands`).
    """

    numbers: Array = leaf("rows E", jnp.float8_e4m3fn)
    scale: Array = leaf("groups rows", jnp.float32)
    dtype: Any = static()  # of the norm

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the norm."""
        rows, E = self.numbers.shape
        return rows // 2, E


@pytree
class OrderedTokens:
    """Stands for a norm, [T, E], that only products read whose weights are held in 4 bits.

    Terms lie in the order that words of weights ask for (`widen_tile.in_order`).
    """

    numbers: Array = leaf("T E", "param")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the norm."""
        return self.numbers.shape

    @property
    def dtype(self) -> Any:
        """The dtype of the norm."""
        return self.numbers.dtype


TokensForProducts: TypeAlias = RoundedTokens | PairedTokens | BandedTokens | OrderedTokens


def told_readers(*weights: Any) -> dict[str, Any]:
    """Returns `readers` for `Ops.add_norm` where all may take `TokensForProducts`, else nothing.

    So an `add_norm` that knows no readers serves all other weights.
    """

    def may_take(w: Any) -> bool:
        if not isinstance(w, QuantizedLinear):
            return False
        given = w.scheme.activation
        return given == ROUNDING or (given is None and w.scheme.code in (ROUNDING.code, "int4"))

    return dict(readers=weights) if weights and all(map(may_take, weights)) else {}


class NormForProducts(NamedTuple):
    """A kernel of `add_norm` whose norm comes as `TokensForProducts`."""

    name: str
    # (x, residual, weight, end, eps, one_more) -> x + residual and its norm, as `Ops.add_norm`.
    run: Callable[..., tuple[Array, TokensForProducts]]
    refuses: Callable[..., str | None]  # (x, residual, weight, end)
    refuses_reader: Callable[[Array, QuantizedLinear], str | None]

    def of(self, readers: Sequence[Weights]) -> Operation:
        """Returns the `add_norm` of a norm that `readers` alone read, if all of them take it."""

        def run(
            x: Array, residual: Array, weight: Array, eps: float, one_more: bool = False,
            end: Array | None = None,
        ) -> tuple[Array, TokensForProducts]:  # fmt: skip
            return self.run(x, residual, weight, end, eps=eps, one_more=one_more)

        def refuses(
            x: Array, residual: Array, weight: Array, eps: float, one_more: bool = False,
            end: Array | None = None,
        ) -> str | None:  # fmt: skip
            for w in readers:
                if not isinstance(w, QuantizedLinear):
                    return "wants weights of few bits"
                if (reason := self.refuses_reader(x, w)) is not None:
                    return reason
            return self.refuses(x, residual, weight, end)

        return Operation(self.name, run, refuses)


def norm_in_fp8(
    name: str, kernel: Callable[..., tuple[Array, Array, Array]],
    refuses_kernel: Callable[[Array, Array, Array], str | None],
    tokens: Callable[[Array, Array, Any], TokensForProducts],
    refuses_reader: Callable[[Array, QuantizedLinear], str | None],
) -> NormForProducts:  # fmt: skip
    """Returns a kernel that makes a norm in fp8 and its scales, which are `tokens`."""

    def run(
        x: Array, residual: Array, weight: Array, _: None, **how: Any
    ) -> tuple[Array, TokensForProducts]:
        total, numbers, scale = kernel(x, residual, weight, **how)
        return total, tokens(numbers, scale, x.dtype)

    def refuses(x: Array, residual: Array, weight: Array, end: Array | None) -> str | None:
        if end is not None:
            return "norms no residual before it is added"
        return refuses_kernel(x, residual, weight)

    return NormForProducts(name, run, refuses, refuses_reader)
