"""Packed vectors that the host uploads: plans, admissions and block copies. Knows no device."""

from collections.abc import Iterator, Sequence
import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxrunner.device.packing import Layout, pack, pad
from jaxrunner.program.bucket import (
    COPIES,
    FEW_STOP_IDS,
    AdmitSize,
    Bucket,
    CopySize,
    MultiStepBucket,
)
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import admission_spec, copies_spec, plan_spec
from jaxrunner.pytree import host_value
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.types import Admission, Copies, Plan, Writes

Write = tuple[int, int, list[int]]  # row, first column, values


def empty_plan(program: Program, size: Bucket | MultiStepBucket) -> tuple[Layout, np.ndarray]:
    """Returns the layout of a `Plan`, and a packed plan of padding."""
    spec, R = plan_spec(program, size), program.dims["R"]
    layout, none = Layout(spec), flat([])
    plan = host_value(
        Plan,
        slot=pad([], size.num_rows, R),
        num_tokens=pad([], size.num_rows, 0),
        blocks=tuple(_writes(none, w.row.size, R) for w in spec.blocks),
    )
    return layout, layout.pack(plan)


def plan_holds(
    program: Program, size: Bucket | MultiStepBucket, blocks: Sequence[Sequence[Write]]
) -> bool:
    """Whether a plan of this size has room for block writes, given by cache group."""
    if not any(blocks):
        return True
    widths = [w.row.size for w in plan_spec(program, size).blocks]
    lengths = [sum(len(ids) for *_, ids in writes) for writes in blocks]
    return all(n <= w for n, w in zip(lengths, widths, strict=True))


class Admissions:
    """Packs `Admission`s of a program, with the rows of its slot tables."""

    def __init__(self, program: Program):
        self._program = program
        self._layout = functools.cache(functools.partial(_admission_layout, program))

    def pack(
        self, size: AdmitSize, slots: Sequence[int], new: Sequence[NewRequest],
        writes: Sequence[np.ndarray],
    ) -> np.ndarray:  # fmt: skip
        """Returns one packed admission.

        slots: of the requests `new`, at most `size.num_rows`.
        writes: of tokens, then of blocks by cache group, [3, W] each, at most `size.num_writes`.
        """
        program, A = self._program, size.num_rows
        R, dims = program.dims["R"], program.dims
        stop_ids = np.full((A, dims["X"] if size.wide else FEW_STOP_IDS), dims["V"], np.int32)
        for i, r in enumerate(new):
            stop_ids[i, : len(r.stop_row)] = r.stop_row
        tokens, *blocks = (_writes(w, size.num_writes, R) for w in writes)
        admission = host_value(
            Admission,
            slot=pad(slots, A, R),
            total_len=pad([len(r.token_ids) for r in new], A, 0),
            num_computed=pad([r.num_computed for r in new], A, 0),
            prompt_len=pad([r.prompt_len for r in new], A, 0),
            min_len=pad([r.prompt_len + r.params.min_tokens for r in new], A, 0),
            max_len=pad([r.max_len for r in new], A, 0),
            prompt_logprobs_start=pad([r.prompt_logprobs_start for r in new], A, 0),
            stop_ids=stop_ids,
            tokens=tokens,
            blocks=tuple(blocks),
        )
        makers = {table.name: table.row for table in program.tables if table.row is not None}
        rows = [{name: row(r) for name, row in makers.items()} for r in new]
        spec, layout = self._layout(size)
        return layout.pack((admission, _stack(rows, spec[1])))


def no_copies(program: Program, size: CopySize) -> np.ndarray:
    """Returns packed copies of padding."""
    sizes = [group.num_blocks for group in program.cache_groups]
    none = (pad([], size.num_copies, N) for N in sizes)
    parts = tuple(host_value(Copies, source=one, to=one) for one in none)
    return pack(copies_spec(program, size), parts)


def block_copies(
    program: Program, new: Sequence[NewRequest]
) -> Iterator[tuple[CopySize, np.ndarray]]:
    """Yields packed block copies of new requests that share the start of a block."""
    copied = [r.copies for r in new if r.copies]
    C, sizes = COPIES.num_copies, [group.num_blocks for group in program.cache_groups]
    for i in range(0, len(copied), C):
        groups = [np.array(pairs).T for pairs in zip(*copied[i : i + C], strict=True)]
        parts = tuple(
            host_value(Copies, source=pad(s, C, N), to=pad(t, C, N))
            for (s, t), N in zip(groups, sizes, strict=True)
        )
        yield COPIES, pack(copies_spec(program, COPIES), parts)


def flat(writes: list[Write]) -> np.ndarray:
    """Returns the rows, columns and values of all writes, int32 [3, W]."""
    lengths = np.array([len(values) for *_, values in writes], np.int64)
    rows, starts = np.array([(row, start) for row, start, _ in writes], np.int64).reshape(-1, 2).T
    first, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    flat = np.empty((3, total), np.int32)
    flat[0] = np.repeat(rows, lengths)
    flat[1] = np.arange(total) + np.repeat(starts - first, lengths)
    flat[2] = np.fromiter(itertools.chain.from_iterable(v for *_, v in writes), np.int32, total)
    return flat


def _admission_layout(program: Program, size: AdmitSize) -> tuple[Any, Layout]:
    spec = admission_spec(program, size)
    return spec, Layout(spec)


def _stack(rows: list[Any], spec: Any) -> Any:
    """Returns the slot tables' rows of requests, stacked and padded with zeros to `spec`."""
    table = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), spec)
    values = zip(*map(jax.tree.leaves, rows), strict=True)  # of each column
    for column, of_requests in zip(jax.tree.leaves(table) if rows else (), values, strict=True):
        if column.size == 0:
            continue
        if column.ndim == 1:
            column[: len(rows)] = of_requests
            continue
        for i, value in enumerate(of_requests):
            column[i, : len(value)] = value
    return table


def _writes(flat: np.ndarray, size: int, num_slots: int) -> Writes:
    row, col, value = flat
    return host_value(
        Writes, row=pad(row, size, num_slots), col=pad(col, size, 0), value=pad(value, size, 0)
    )
