"""Blocks that count themselves, and a meeting of all of them in the middle of a kernel.

What a block has written before is seen by the one that counts last, and by all after they have
met. Those that meet must all be on the chip at once: no more of them than multiprocessors.
Counters are 0 between launches, and are passed as an input: a kernel leaves them as they were.
"""

from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from jaxrunner.kernels_pallas import lanes, mosaic
from jaxrunner.kernels_pallas.mosaic import Ref

REF = plgpu.RefType()


def arrive(counter: Ref, num: int) -> None:
    """Signals that a warpgroup has written its part, one of `num`; copies may read it then."""

    @mosaic.inline_mgpu(arg_types=(REF,))
    def tell(_: Any, counter: ir.Value) -> None:
        _fence()
        mgpu.warpgroup_barrier()
        with mgpu.when(is_first_thread()):
            count(counter, mgpu.c(num - 1, ir.IntegerType.get_signless(32)))

    tell(counter)


def wait(counter: Ref) -> None:
    """Waits for all to have arrived, this block's warpgroups before."""

    @mosaic.inline_mgpu(arg_types=(REF,))
    def meet(_: Any, counter: ir.Value) -> None:
        with mgpu.when(is_first_thread()):
            spin(counter)
            _fence()
        mgpu.warpgroup_barrier()

    meet(counter)


def multiprocessors() -> int | None:
    """Returns those of the device that is lowered for, which need not be here; None for a CPU."""
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.num_cores
    return getattr(jax.local_devices()[0], "core_count", None)


def spin(counter: ir.Value) -> None:
    """Waits until the last one has counted, which sets `counter` to 0. In MLIR, for a thread."""
    i32 = ir.IntegerType.get_signless(32)
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        seen = mosaic.inline_asm(
            i32, [utils.memref_ptr(counter)], "ld.acquire.gpu.global.u32 $0, [$1];",
            "=r,l", has_side_effects=True,
        )  # fmt: skip
        scf.condition(arith.cmpi(arith.CmpIPredicate.ne, seen, mgpu.c(0, i32)), [])
    with ir.InsertionPoint(loop.after.blocks.append()):
        scf.yield_([])


def count(counter: ir.Value, last: ir.Value) -> ir.Value:
    """Counts up, `last` being followed by 0, and returns what was there. In MLIR, for a thread."""
    return mosaic.inline_asm(
        ir.IntegerType.get_signless(32), [utils.memref_ptr(counter), last],
        "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;", "=r,l,r", has_side_effects=True,
    )  # fmt: skip


def is_first_thread() -> ir.Value:
    """Returns whether a thread is the first of its warpgroup. In MLIR."""
    zero = mgpu.c(0, ir.IntegerType.get_signless(32))
    return arith.cmpi(arith.CmpIPredicate.eq, lanes.thread(), zero)


def _fence() -> None:
    """Orders what threads read and write, and what copies do."""
    nothing = ir.Type.parse("!llvm.void")
    mosaic.inline_asm(nothing, [], "fence.proxy.async;", "", has_side_effects=True)
