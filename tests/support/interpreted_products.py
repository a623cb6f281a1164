"""Kernels with products of matrix units in Pallas' interpreter, which has none for `pl.run_state`.

Accumulators are values here, products happen where they are asked for, and what writes registers to
memory in MLIR writes arrays. So a kernel's order of copies, barriers and tiles is what is tested.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from jaxrunner.kernels_pallas import mosaic, pdl
from tests.support.states import interpreted


class Accumulator:
    """A reference to registers: a product's sums, or another result of `pl.run_state`."""

    def __init__(self, value: jax.Array):
        self.value = value

    def __setitem__(self, index: Any, value: jax.Array) -> None:
        assert (value.shape, value.dtype) == (self.value.shape, self.value.dtype)
        self.value = value

    @classmethod
    def init(cls, array: jax.Array) -> "Accumulator":
        return cls(array)


def run_state(body: Callable[[Any], None]) -> Callable[[Any], Any]:
    """Stands for `pl.run_state`."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Accumulator)

    def run(values: Any) -> Any:
        refs = jax.tree.map(lambda x: x if is_leaf(x) else Accumulator(x), values, is_leaf=is_leaf)
        body(refs)
        return jax.tree.map(lambda ref: ref.value, refs, is_leaf=is_leaf)

    return run


def wgmma(acc: Accumulator, a: Any, b: Any) -> None:
    """Stands for `mosaic.wgmma`; a lies in registers or in shared memory."""
    weights = a if isinstance(a, jax.Array) else a[...]
    acc.value += jnp.dot(weights.astype(jnp.float32), b[...].astype(jnp.float32))


def interpret(monkeypatch: Any, pairs: Any) -> bool:
    """Has kernels interpreted, and says so; on a GPU they run as they are.

    pairs: the module whose kernel's registers are written in MLIR.
    """
    kernel, how = plgpu.kernel, interpreted(detect_races=False)
    if how is None:
        return False

    def launch(body: Any, *, compiler_params: Any = None, **options: Any) -> Any:
        return kernel(body, interpret=how, **options)

    def put(ref: Any, x: jax.Array) -> None:
        ref[...] = x

    def put_heads(x: jax.Array, ref: Any) -> None:
        ref[...] = x[: ref.shape[0]]

    replaced: dict[Any, dict[str, Any]] = {
        pl: dict(run_state=run_state),
        plgpu: dict(kernel=launch, griddepcontrol_wait=lambda: None),
        pdl: dict(begin=lambda: None),
        mosaic: dict(wgmma=wgmma, ACC=Accumulator, wgmma_accumulator_load=lambda acc, wait_n: None),
        pairs: dict(put=put, put_heads=put_heads, rescale=lambda acc, kept: acc * kept[:, None]),
    }
    for module, names in replaced.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    return True
