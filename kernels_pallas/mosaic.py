"""Types of what is in a kernel, and Pallas' functions on it under types that kernels fit.

A reference in a kernel is traced, and of no class that JAX exports; Pallas' own signatures name
another one, and differ from JAX to JAX. The functions here are Pallas' own, not wrappers of them,
so that kernels, and the lines that profiles show, are what they are without this module.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from jaxrunner.types import Array

Part = TypeVar("Part", covariant=True)
Shaped: TypeAlias = Array | jax.ShapeDtypeStruct  # enough to say whether a kernel serves it
Index: TypeAlias = int | Array  # static where a loop is unrolled, else traced
# Why no kernel runs on this JAX; None where kernels do.
TOO_OLD = (
    f"wants JAX 0.11 or later, got {jax.__version__}" if jax.__version_info__ < (0, 11) else None
)
CORES = 132  # multiprocessors of an H200
Layout: TypeAlias = Any  # how an array lies in registers; the class of all layouts is private


class At(Protocol[Part]):
    """The indexer that returns a part of a reference."""

    def __getitem__(self, index: Any, /) -> Part: ...


class Ref(Protocol):
    """An array in the device's memory, in shared memory or in a product's accumulator."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> jnp.dtype: ...
    @property
    def at(self) -> At["Ref"]: ...
    @property
    def T(self) -> "Ref": ...
    def __getitem__(self, index: Any, /) -> Array: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...


class Barrier(Protocol):
    """A barrier in shared memory, or several."""

    @property
    def at(self) -> At["Barrier"]: ...


class CopyGmemToSmem(Protocol):
    """Starts a copy into shared memory; the barrier signals its end."""

    def __call__(
        self, source: Ref, target: Ref, barrier: Barrier, *, collective_axes: str | None = None
    ) -> None: ...


class Load(Protocol):
    """Reads a reference into registers; what is not `optimized` may read any layout."""

    def __call__(self, source: Ref, *, layout: Layout, optimized: bool = True) -> Array: ...


class LoadAccumulator(Protocol):
    """Reads an accumulator once all but the last `wait_n` products are done."""

    def __call__(self, acc: Ref, *, wait_n: int) -> Array: ...


class InlineMgpu(Protocol):
    """Makes a function of MLIR values, which a context precedes, one of references and arrays."""

    def __call__(
        self, *, arg_types: tuple[Any, ...], return_type: Any = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


class Accumulator(Protocol):
    """Asks for the accumulator of a product, to begin with zeros or with an array."""

    def __call__(self, shape: tuple[int, int], dtype: Any, /) -> Any: ...
    def init(self, array: Array, /) -> Any: ...


_pallas: Any = plgpu
_llvm: Any = llvm
ACC: Accumulator = _pallas.ACC
barrier_arrive: Callable[[Barrier], None] = _pallas.barrier_arrive
barrier_wait: Callable[[Barrier], None] = _pallas.barrier_wait
copy_gmem_to_smem: CopyGmemToSmem = _pallas.copy_gmem_to_smem
copy_smem_to_gmem: Callable[[Ref, Ref], None] = _pallas.copy_smem_to_gmem
inline_mgpu: InlineMgpu = _pallas.inline_mgpu
load: Load = _pallas.load  # without an index from JAX 0.11 on
wgmma: Callable[[Ref, Ref | Array, Ref], None] = _pallas.wgmma
wgmma_accumulator_load: LoadAccumulator = _pallas.wgmma_accumulator_load
inline_asm: Callable[..., ir.Value] = _llvm.inline_asm  # a value unless it writes none


def tiled(columns: int, itemsize: int) -> tuple[Any, Any]:
    """Says that a matrix lies in shared memory in tiles of 8 rows, [8, columns], swizzled."""
    swizzle = columns * itemsize
    return _pallas.TilingTransform((8, columns)), _pallas.SwizzleTransform(swizzle)
