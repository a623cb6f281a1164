"""Stores that need not be as fast as can be."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxrunner.types import Array


def put(ref, x: Array) -> None:
    """Writes x to a reference; from JAX 0.12 on only this does where banks of memory conflict."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def put_rows(x: Array, ref, layout=plgpu.Layout.WGMMA) -> None:
    """Writes the first rows of x from registers, as many as `ref` has."""

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def write(_, x, ref):
        limit = mgpu.c(ir.MemRefType(ref.type).shape[0], ir.IndexType.get())
        places = x.layout.thread_idxs(x.shape)
        for (row, column), value in zip(places, x.registers.flat, strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, row, limit)):
                vector.store(value, ref, [row, column])

    write(x, ref)
