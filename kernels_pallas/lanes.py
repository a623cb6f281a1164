"""Vectors of 128, an element a thread of one warpgroup: what kernels that never tile are made of.

Arithmetic on them stays in registers. Threads exchange data through shared memory.
"""

from collections.abc import Callable, Sequence
import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector
import numpy as np

from jaxrunner.kernels_pallas import mosaic
from jaxrunner.kernels_pallas.mosaic import Ref
from jaxrunner.sampling.gumbel import GROUP_BITS, RARE, rare, usual
from jaxrunner.types import Array

LANES = 128
LAYOUT = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def kernel(
    body: Callable[..., None], out: Any, grid: tuple[int, ...], scratch: Any = ()
) -> Callable[..., Any]:
    """Returns a kernel of one warpgroup a program: `body(*program, *inputs, *out, *scratch)`."""
    names = ("row", "part")[: len(grid)]

    def run(*refs: Ref) -> None:
        body(*(lax.axis_index(name) for name in names), *refs)

    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    return plgpu.kernel(
        run, out_type=out, grid=grid, grid_names=names, scratch_types=scratch,
        compiler_params=params,
    )  # fmt: skip


def lane() -> Array:
    """Returns each thread's number."""
    return plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=LAYOUT)


def thread() -> ir.Value:
    """Returns a thread's number in its warpgroup, as `lane`. In MLIR."""
    return arith.remui(mgpu.thread_idx(), mgpu.c(LANES, ir.IntegerType.get_signless(32)))


def full(value: Any, dtype: Any) -> Array:
    """Returns a vector of equal numbers, for loops to carry."""
    return plgpu.layout_cast(jnp.full((LANES,), value, dtype), LAYOUT)


def ones(mask: Array) -> Array:
    """Returns 1 where a mask holds, else 0."""
    return jnp.where(mask, 1, 0).astype(jnp.int32)


def count(masks: Sequence[Array]) -> Array:
    """Returns how many of several masks hold, for each thread."""
    return functools.reduce(jnp.add, map(ones, masks))


def places(masks: Sequence[Array], scratch: Ref) -> tuple[list[Array], Array]:
    """Returns where to put what is masked, side by side, and how much that is.

    scratch: [256], int32, in shared memory.
    """
    first, total = before(count(masks), scratch)
    out = [first]
    for mask in masks[:-1]:
        out.append(out[-1] + ones(mask))
    return out, total


def before(counts: Array, scratch: Ref) -> tuple[Array, Array]:
    """Returns the sum of the counts of the threads before each, and of all.

    scratch: [256], int32, in shared memory.
    """
    total, step = counts, 1
    scratch[pl.ds(0, LANES)] = full(0, jnp.int32)
    while step < LANES:
        scratch[pl.ds(LANES, LANES)] = total
        total = total + scratch[pl.ds(LANES - step, LANES)]
        step *= 2
    return total - counts, jnp.sum(counts)


def gather(ref: Ref, index: Array) -> Array:
    """Reads `ref[index]`, each thread its own element."""
    is_signed = True if jnp.issubdtype(ref.dtype, jnp.integer) else None

    @mosaic.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT),
        return_type=plgpu.ShapeDtypeStruct((LANES,), ref.dtype, layout=LAYOUT),
    )
    def load(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        value = memref.load(ref, [_position(index)])
        registers = np.array([vector.broadcast(ir.VectorType.get((1,), value.type), value)], object)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=is_signed
        )

    return load(ref, index)


def scatter(
    index: Sequence[Array], keep: Sequence[Array], *pairs: tuple[Ref, Sequence[Array]]
) -> None:
    """Sets `ref[index] = value` where `keep`, for pairs of a reference to shared memory and values.

    All that one mask keeps in one call: of two calls in a row LLVM makes one branch with barriers
    within, which some threads of a warp then never come to.
    """
    num, refs = len(index), [ref for ref, _ in pairs]
    arrays = [x for part in (index, keep, *(values for _, values in pairs)) for x in part]

    @mosaic.inline_mgpu(
        arg_types=(*[plgpu.RefType()] * len(refs), *[LAYOUT] * len(arrays)),
    )
    def store(_: Any, *args: Any) -> None:
        refs, arrays = args[: len(pairs)], args[len(pairs) :]
        mgpu.utils.warpgroup_barrier()
        for i in range(num):
            where, wanted, *values = arrays[i::num]
            with ir.InsertionPoint(scf.IfOp(_element(wanted)).then_block):
                for ref, value in zip(refs, values, strict=True):
                    memref.store(_element(value), ref, [_position(where)])
                scf.yield_([])
        mgpu.utils.warpgroup_barrier()

    store(*refs, *arrays)


def put(ref: Ref, start: Array, offsets: Sequence[int], values: Sequence[Array]) -> None:
    """Sets `ref[start + offset + thread] = value`, each thread its own element, without barriers:
    a reference to device memory that this kernel does not read."""

    @mosaic.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), *[LAYOUT] * len(values)),
    )
    def store(_: Any, ref: ir.Value, start: mgpu.FragmentedArray, *values: Any) -> None:
        index = ir.IndexType.get()
        first = arith.index_cast(index, arith.addi(start.registers.item(), thread()))
        for offset, value in zip(offsets, values, strict=True):
            memref.store(_element(value), ref, [arith.addi(first, mgpu.c(offset, index))])

    store(ref, start, *values)


def tally(ref: Ref, index: Sequence[Array], keep: Sequence[Array]) -> None:
    """Adds 1 to `ref[index]`, in shared memory, where `keep`.

    Additions are relaxed, and ordered by the barriers around them: `memref.atomic_rmw` is acq_rel
    of the whole system, and fences of a microsecond come with each.
    """

    @mosaic.inline_mgpu(arg_types=(plgpu.RefType(), *[LAYOUT] * (2 * len(index))))
    def add(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        i32, nothing = ir.IntegerType.get_signless(32), ir.Type.parse("!llvm.void")
        first = llvm.ptrtoint(i32, utils.memref_ptr(ref))
        mgpu.utils.warpgroup_barrier()
        for where, wanted in zip(arrays[: len(index)], arrays[len(index) :], strict=True):
            at = arith.addi(first, arith.muli(_element(where), mgpu.c(4, i32)))
            mosaic.inline_asm(
                nothing, [at, _element(wanted)], "@$1 red.relaxed.cta.shared.add.u32 [$0], 1;",
                "r,b,~{memory}", has_side_effects=True,
            )  # fmt: skip
        mgpu.utils.warpgroup_barrier()

    add(ref, *index, *keep)


def _element(x: mgpu.FragmentedArray) -> ir.Value:
    return vector.extract(x.registers[0], dynamic_position=[], static_position=[0])


def _position(index: mgpu.FragmentedArray) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), _element(index))


def order(x: Array) -> Array:
    """Maps a float to an integer of the same order, and back; -0 comes before 0."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def unorder(key: Array) -> Array:
    """Maps an integer of `order` back."""
    return lax.bitcast_convert_type(key ^ ((key >> 31) & 0x7FFFFFFF), jnp.float32)


def gumbel(key: tuple[Array, Array], ids: Array) -> Array:
    """Returns bit for bit `sampling.gumbel.gumbel` of a key and tokens, [128]."""
    token_ids, noise = rare_noise(key, ids >> GROUP_BITS)
    return jnp.where(ids == token_ids, noise, usual_noise(key, ids))


def usual_noise(key: tuple[Array, Array], ids: Array) -> Array:
    """Returns the noise of tokens, [128], that are not rare."""
    high, low = _threefry(key, ids.astype(jnp.uint32))
    return usual(high ^ low)  # joined as `jax.random.bits` does


def rare_noise(key: tuple[Array, Array], groups: Array) -> tuple[Array, Array]:
    """Returns the rare token of groups, [128], -1 for none, and its noise."""
    groups = groups.astype(jnp.uint32)
    return rare(groups, *_threefry(key, groups + jnp.uint32(RARE)))


def _threefry(key: tuple[Array, Array], low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 of (0, low)."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = keys[0], low + keys[1]
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x = x + y
            y = x ^ ((y << jnp.uint32(r)) | (y >> jnp.uint32(32 - r)))
        x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x, y
