"""The host's side of the request table: who has which slot, and what to upload. Knows no device."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxrunner.layout import AdmitSize, Bucket, Program, admission_spec, admit_sizes, plan_spec
from jaxrunner.pytree import of
from jaxrunner.request import NewRequest
from jaxrunner.transfer import pack, pad
from jaxrunner.types import Admission, Plan, Writes

Write = tuple[int, int, list[int]]  # row, first column, values


class Slots:
    """Slots of running requests. The last one freed is the first one handed out."""

    def __init__(self, program: Program):
        self._program = program
        self._free = list(range(program.engine.max_num_seqs))
        self._slot_of: dict[str, int] = {}
        self._num_blocks: dict[str, list[int]] = {}  # by cache group
        self._greedy: dict[str, bool] = {}

    def __getitem__(self, request_id: str) -> int:
        return self._slot_of[request_id]

    def add(self, request: NewRequest) -> int:
        """Gives a request a slot; one with its id is replaced.

        Raises:
          RuntimeError: none is free.
        """
        self.remove(request.request_id)
        if not self._free:
            raise RuntimeError(
                f"max_num_seqs={self._program.engine.max_num_seqs} slots are all taken, "
                f"request {request.request_id!r} needs one: finish or preempt a request first"
            )
        slot = self._slot_of[request.request_id] = self._free.pop()
        self._num_blocks[request.request_id] = [len(ids) for ids in request.block_ids]
        params = request.params
        self._greedy[request.request_id] = params.is_greedy and not params.min_tokens
        return slot

    def remove(self, request_id: str) -> None:
        """Frees a request's slot; an unknown id is ignored."""
        if request_id in self._slot_of:
            self._free.append(self._slot_of.pop(request_id))
            del self._num_blocks[request_id], self._greedy[request_id]

    def all_greedy(self, request_ids) -> bool:
        """Whether every request takes its likeliest token with no rule in the way."""
        return all(self._greedy[r] for r in request_ids)

    def append_blocks(self, new: Mapping[str, tuple[list[int], ...]]) -> tuple[list[Write], ...]:
        """Returns the writes, by cache group, that append blocks to requests' tables."""
        groups: tuple[list[Write], ...] = tuple([] for _ in self._program.config.groups)
        for request_id, block_ids in new.items():
            counts = self._num_blocks[request_id]
            for g, ids in enumerate(block_ids):
                groups[g].append((self._slot_of[request_id], counts[g], ids))
                counts[g] += len(ids)
        return groups

    def plan(self, req_ids, counts: Mapping[str, int], blocks, bucket: Bucket) -> np.ndarray:
        """Returns the packed plan of a step: each request's tokens, and blocks it gained."""
        spec, R = plan_spec(self._program, bucket), self._program.engine.max_num_seqs
        plan = of(
            Plan,
            slot=pad([self._slot_of[r] for r in req_ids], bucket.num_rows, R),
            num_tokens=pad([counts[r] for r in req_ids], bucket.num_rows, 0),
            blocks=tuple(
                _writes(_flat(b), w.row.size, R) for b, w in zip(blocks, spec.blocks, strict=True)
            ),
        )
        return pack(spec, plan)

    def room(self, blocks, bucket: Bucket) -> bool:
        """Whether a plan of this bucket holds these block writes."""
        widths = [w.row.size for w in plan_spec(self._program, bucket).blocks]
        lengths = [sum(len(ids) for *_, ids in writes) for writes in blocks]
        return all(n <= w for n, w in zip(lengths, widths, strict=True))

    def admissions(self, new: list[NewRequest], blocks) -> Iterator[tuple[AdmitSize, np.ndarray]]:
        """Returns the packed admissions of new requests and of the given block writes."""
        tokens = [(self._slot_of[r.request_id], 0, r.token_ids) for r in new]
        groups = [list(writes) for writes in blocks]
        for r in new:
            for g, ids in enumerate(r.block_ids):
                groups[g].append((self._slot_of[r.request_id], 0, ids))
        flat = [_flat(tokens), *map(_flat, groups)]
        longest = max(writes.shape[1] for writes in flat)
        small, large = admit_sizes(self._program)
        size = small if len(new) <= small.num_rows and longest <= small.num_writes else large
        for i in range(max(-(-len(new) // size.num_rows), -(-longest // size.num_writes))):
            part = slice(i * size.num_writes, (i + 1) * size.num_writes)
            rows = new[i * size.num_rows : (i + 1) * size.num_rows]
            yield size, self._admission(rows, [writes[:, part] for writes in flat], size)

    def _admission(self, new: list[NewRequest], writes: list[np.ndarray], size: AdmitSize):
        program, A = self._program, size.num_rows
        R, dims = program.engine.max_num_seqs, program.dims
        stop_ids = np.full((A, dims["X"]), dims["V"], np.int32)
        for i, r in enumerate(new):
            stop_ids[i, : len(r.stop_ids)] = sorted(r.stop_ids)
        tokens, *blocks = (_writes(w, size.num_writes, R) for w in writes)
        admission = of(
            Admission,
            slot=pad([self._slot_of[r.request_id] for r in new], A, R),
            total_len=pad([len(r.token_ids) for r in new], A, 0),
            num_computed=pad([r.num_computed for r in new], A, 0),
            prompt_len=pad([r.prompt_len for r in new], A, 0),
            min_len=pad([r.prompt_len + r.params.min_tokens for r in new], A, 0),
            max_len=pad([r.max_len for r in new], A, 0),
            stop_ids=stop_ids,
            tokens=tokens,
            blocks=tuple(blocks),
        )
        spec = admission_spec(program, size)
        rows = tuple(
            _stack([rule.row(r.params, r.seed) for r in new], want)
            for rule, want in zip(program.rules, spec[1], strict=True)
        )
        return pack(spec, (admission, rows))


def _stack(rows: list[Any], spec: Any) -> Any:
    """Stacks requests' rows of one rule, padded with zeros to `spec`."""
    table = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), spec)
    for i, row in enumerate(rows):
        for column, value in zip(jax.tree.leaves(table), jax.tree.leaves(row), strict=True):
            column[i] = value
    return table


def _flat(writes: list[Write]) -> np.ndarray:
    """Returns writes one by one: rows, columns and values, [3, W]."""
    parts = [
        np.stack([np.full(len(v), row), np.arange(start, start + len(v)), v])
        for row, start, v in writes
        if len(v)
    ]
    return np.concatenate([np.zeros((3, 0), np.int64), *parts], axis=1)


def _writes(flat: np.ndarray, size: int, num_slots: int) -> Writes:
    row, col, value = flat
    return of(
        Writes, row=pad(row, size, num_slots), col=pad(col, size, 0), value=pad(value, size, 0)
    )
