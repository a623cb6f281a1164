"""Widens a quantised matrix of a checkpoint to floats, for a family that needs it as floats.

Such a matrix is no product with tokens: the family splits it, or multiplies other weights by it.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.model import Source
from jaxrunner.quantization.placing import Arrays, Placing
from jaxrunner.quantization.quantized_linear import QuantizedLinear

LEAVES = "weight", "scale", "zero", "permutation"  # the leaves of its values


def widened(source: Source, method: Any) -> Source:
    """Returns the source of a matrix, [outputs, inputs], of a module that a `Method` may hold so.

    Its values are made in float32, of all tensors that the module has, and held in the dtype that
    is computed in. A method that rounds float weights leaves it as it is.

    Raises:
      ValueError: sizes that the method does not hold.
    """
    (name,), ((N, K),) = source.names, source.shapes
    scheme = method.scheme(name.removesuffix(".weight"), (N, K))
    if scheme is None:
        return source
    given, dims = scheme.declare(dict(outputs="N", inputs="K"), dict(N=N, K=K))
    held = pytree.build(_shape, QuantizedLinear, dims, given)
    made = method.sources(Placing(Source.whole(name, N, K), 1, held), None)
    leaves = {leaf: of for leaf in LEAVES if (of := getattr(made, leaf)) is not None}
    if all(of.names == source.names for of in leaves.values()):
        return source  # of floats
    first, *others = leaves.values()
    whole = functools.reduce(Source.beside, others, first)
    at = [whole.names.index(name) for name in dict.fromkeys(whole.names)]  # each tensor once
    names = tuple(whole.names[i] for i in at)
    shapes, dtypes = tuple(whole.shapes[i] for i in at), tuple(whole.dtypes[i] for i in at)
    return Source(
        names, shapes, functools.partial(_widen, source, held, leaves, names), None, dtypes
    )


def _widen(
    source: Source, held: QuantizedLinear, leaves: Mapping[str, Source], names: tuple[str, ...],
    parts: Arrays,
) -> np.ndarray:  # fmt: skip
    tensors = dict(zip(names, parts, strict=True))
    made: dict[str, Any] = dict.fromkeys(("zero", "permutation", "input_scale", "bias"))
    for leaf, of in leaves.items():
        made[leaf] = jnp.asarray(of.join([tensors[name] for name in of.names]))
    w = QuantizedLinear(**made, scheme=held.scheme)
    return source.join([np.asarray(w.values())])


def _shape(axes: tuple[str, ...], shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
