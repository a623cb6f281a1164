"""The host's side of the request table: who has which slot, and what to upload. Knows no device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import copy
import functools
import itertools
from typing import Any

import jax
import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.packing import Layout, pack, pad
from jaxrunner.program import (
    COPIES,
    FEW_STOP_IDS,
    AdmitSize,
    Bucket,
    CopySize,
    MultiStepBucket,
    Program,
    SampleSize,
)
from jaxrunner.pytree import host_value
from jaxrunner.runner.slot import Needs, PendingPromptLogprobs, Slot
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.shapes import admission_spec, admit_sizes, copies_spec, logprob_widths, plan_spec
from jaxrunner.types import Admission, Copies, Plan, Writes

Write = tuple[int, int, list[int]]  # row, first column, values


class RequestTable:
    """Slots of running requests. The last one freed is the first one handed out."""

    SAVED = ("_free", "_slots", "_unusual", "lora_ids")

    def __init__(self, program: Program):
        self._program = program
        self._free = list(range(program.engine.max_num_seqs))
        self._slots: dict[str, Slot] = {}
        self._unusual: set[str] = set()  # ids of those that are not `is_usual`
        self.lora_ids: dict[str, int] = {}  # adapters of those that have one, by their ids
        self._no_plan = functools.cache(self._empty_plan)
        self._admission_layout = functools.cache(self._admission_spec)

    def __getitem__(self, request_id: str) -> int:
        return self._slots[request_id].index

    def copy(self) -> "RequestTable":
        """Returns a table of the same requests, which goes its own way."""
        return copy.deepcopy(self, {id(self._program): self._program})  # that one is shared

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
        pending = PendingPromptLogprobs(
            request.num_computed, request.prompt_logprobs_start, request.prompt_len
        )
        num_blocks = [len(ids) for ids in request.block_ids]
        slot = Slot(self._free.pop(), num_blocks, self._needs_of(request.params), pending)
        self._slots[request.request_id] = slot
        if not slot.is_usual:
            self._unusual.add(request.request_id)
        return slot.index

    def remove(self, request_id: str) -> None:
        """Frees a request's slot; an unknown id is ignored."""
        if (slot := self._slots.pop(request_id, None)) is not None:
            self._free.append(slot.index)
            self.lora_ids.pop(request_id, None)
            self._unusual.discard(request_id)

    def note_adapter(self, request: NewRequest) -> None:
        """Notes the adapter of a request that has a slot, if it has one."""
        if request.lora_id:
            self.lora_ids[request.request_id] = request.lora_id

    @property
    def num_taken(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)

    @property
    def need_single_steps(self) -> bool:
        """Whether the host works between the tokens of a request."""
        return any(self._slots[r].needs.single_steps for r in self._unusual)

    def sample_size(self, req_ids: Iterable[str], bucket: Bucket) -> SampleSize:
        """Returns what the draw of these requests needs."""
        needs = [self._slots[r].needs for r in self._unusual.intersection(req_ids)]
        columns = max((need.num_logprobs for need in needs), default=0)
        all_rules = any(need.all_rules for need in needs)
        return SampleSize(bucket.num_rows, all_rules, columns, bucket.num_drafts)

    def count_targets(self, counts: Mapping[str, int]) -> tuple[int, int]:
        """Returns how many prompt tokens' logprobs a step gives, at most, and their columns.

        Takes them off what is still to come.
        """
        total = columns = 0
        for r in [r for r in self._unusual if r in counts]:
            slot = self._slots[r]
            left = slot.prompt_logprobs.after(counts[r])
            if due := slot.prompt_logprobs.num_left - left.num_left:
                total, columns = total + due, max(columns, slot.needs.num_prompt_logprobs)
            slot.prompt_logprobs = left
            if slot.is_usual:
                self._unusual.discard(r)
        return total, columns

    def _needs_of(self, params: SamplingParams) -> Needs:
        columns = [self._width(k) for k in (params.num_logprobs, params.prompt_logprobs)]
        asked = (rule.is_requested for rule in self._program.rules)
        all_rules = any(is_requested(params) for is_requested in asked if is_requested)
        whole = columns[0] == self._program.config.vocab_size
        single_steps = whole or params.structured_outputs is not None
        return Needs(all_rules or columns[0] > 0, single_steps, *columns)

    def _width(self, num_logprobs: int | None) -> int:
        widths = logprob_widths(self._program.config.vocab_size)
        if num_logprobs is None:
            return 0
        return widths[-1] if num_logprobs == -1 else next(w for w in widths if w >= num_logprobs)

    def append_blocks(self, new: Mapping[str, tuple[list[int], ...]]) -> tuple[list[Write], ...]:
        """Returns the writes, by cache group, that append blocks to requests' tables."""
        groups: tuple[list[Write], ...] = tuple([] for _ in self._program.cache_groups)
        for request_id, block_ids in new.items():
            slot = self._slots[request_id]
            for g, ids in enumerate(block_ids):
                groups[g].append((slot.index, slot.num_blocks[g], ids))
                slot.num_blocks[g] += len(ids)
        return groups

    def plan(
        self,
        req_ids: Sequence[str],
        counts: Sequence[int],
        blocks: Sequence[list[Write]],
        size: Bucket | MultiStepBucket,
    ) -> np.ndarray:
        """Returns the packed plan of a step: the tokens that each request computes, `counts`, in
        each of several steps if there are such; and the blocks that it gained."""
        layout, padding = self._no_plan(size)
        vector = padding.copy()
        plan = layout.read(vector)  # views
        plan.slot[: len(req_ids)] = [self._slots[r].index for r in req_ids]
        plan.num_tokens[: len(req_ids)] = counts
        for writes, w in zip(blocks, plan.blocks, strict=True):
            if writes:
                row, col, value = _flat(writes)
                w.row[: row.size], w.col[: row.size], w.value[: row.size] = row, col, value
        return vector

    def _empty_plan(self, size: Bucket | MultiStepBucket) -> tuple[Layout, np.ndarray]:
        """Returns the layout of a plan, and one of padding alone."""
        spec, R = plan_spec(self._program, size), self._program.engine.max_num_seqs
        layout, none = Layout(spec), _flat([])
        plan = host_value(
            Plan,
            slot=pad([], size.num_rows, R),
            num_tokens=pad([], size.num_rows, 0),
            blocks=tuple(_writes(none, w.row.size, R) for w in spec.blocks),
        )
        return layout, layout.pack(plan)

    def room(self, blocks: Sequence[list[Write]], size: Bucket | MultiStepBucket) -> bool:
        """Whether a plan of this size holds these block writes."""
        if not any(blocks):
            return True
        widths = [w.row.size for w in plan_spec(self._program, size).blocks]
        lengths = [sum(len(ids) for *_, ids in writes) for writes in blocks]
        return all(n <= w for n, w in zip(lengths, widths, strict=True))

    def admissions(
        self, new: list[NewRequest], blocks: Sequence[list[Write]]
    ) -> Iterator[tuple[AdmitSize, np.ndarray]]:
        """Returns the packed admissions of new requests and of the given block writes."""
        tokens = [(self[r.request_id], 0, r.token_ids) for r in new]
        groups = [list(writes) for writes in blocks]
        for r in new:
            for g, ids in enumerate(r.block_ids):
                groups[g].append((self[r.request_id], 0, ids))
        flat = [_flat(tokens), *map(_flat, groups)]
        longest = max(writes.shape[1] for writes in flat)
        many = any(len(r.stop_row) > FEW_STOP_IDS for r in new)
        wide = many or any(self._slots[r.request_id].needs.all_rules for r in new)
        sizes = [size for size in admit_sizes(self._program) if size.wide >= wide]
        fits = (s for s in sizes if len(new) <= s.num_rows and longest <= s.num_writes)
        size = next(fits, max(sizes, key=lambda s: (s.num_rows, s.num_writes)))
        for i in range(max(-(-len(new) // size.num_rows), -(-longest // size.num_writes))):
            part = slice(i * size.num_writes, (i + 1) * size.num_writes)
            rows = new[i * size.num_rows : (i + 1) * size.num_rows]
            yield size, self._admission(rows, [writes[:, part] for writes in flat], size)

    def no_admission(self, size: AdmitSize) -> np.ndarray:
        """Returns a packed admission of nothing."""
        return self._admission([], [_flat([])] * (1 + len(self._program.cache_groups)), size)

    def no_copies(self, size: CopySize) -> np.ndarray:
        """Returns packed copies of nothing."""
        sizes = [group.num_blocks for group in self._program.cache_groups]
        none = (pad([], size.num_copies, N) for N in sizes)
        parts = tuple(host_value(Copies, source=one, to=one) for one in none)
        return pack(copies_spec(self._program, size), parts)

    def of_ranks(self, req_ids: Iterable[str], values: Iterable[Any]) -> list[list[Any]]:
        """Returns what belongs to requests, by data rank: there is one."""
        return [list(values)]

    def rows(self, req_ids: Sequence[str], num_rows: int) -> tuple[str, ...]:
        """Returns the request of each row."""
        return tuple(req_ids)

    def _admission_spec(self, size: AdmitSize) -> tuple[Any, Layout]:
        spec = admission_spec(self._program, size)
        return spec, Layout(spec)

    def copies(self, new: list[NewRequest]) -> Iterator[tuple[CopySize, np.ndarray]]:
        """Returns the packed block copies that new requests start from."""
        copied = [r.copies for r in new if r.copies]
        C, sizes = COPIES.num_copies, [group.num_blocks for group in self._program.cache_groups]
        for i in range(0, len(copied), C):
            groups = [np.array(pairs).T for pairs in zip(*copied[i : i + C], strict=True)]
            parts = tuple(
                host_value(Copies, source=pad(s, C, N), to=pad(t, C, N))
                for (s, t), N in zip(groups, sizes, strict=True)
            )
            yield COPIES, pack(copies_spec(self._program, COPIES), parts)

    def _admission(self, new: list[NewRequest], writes: list[np.ndarray], size: AdmitSize):
        program, A = self._program, size.num_rows
        R, dims = program.engine.max_num_seqs, program.dims
        stop_ids = np.full((A, dims["X"] if size.wide else FEW_STOP_IDS), dims["V"], np.int32)
        for i, r in enumerate(new):
            stop_ids[i, : len(r.stop_row)] = r.stop_row
        tokens, *blocks = (_writes(w, size.num_writes, R) for w in writes)
        admission = host_value(
            Admission,
            slot=pad([self[r.request_id] for r in new], A, R),
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
        told = {table.name: table.row for table in program.tables if table.row is not None}
        rows = [{name: row(r) for name, row in told.items()} for r in new]
        spec, layout = self._admission_layout(size)
        return layout.pack((admission, _stack(rows, spec[1])))


def _stack(rows: list[Any], spec: Any) -> Any:
    """Stacks requests' rows of all slot tables, padded with zeros to `spec`."""
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


def _flat(writes: list[Write]) -> np.ndarray:
    """Returns writes one by one: rows, columns and values, [3, W]."""
    lengths = np.array([len(values) for *_, values in writes], np.int64)
    rows, starts = np.array([(row, start) for row, start, _ in writes], np.int64).reshape(-1, 2).T
    first, total = np.cumsum(lengths) - lengths, int(lengths.sum())
    flat = np.empty((3, total), np.int32)
    flat[0] = np.repeat(rows, lengths)
    flat[1] = np.arange(total) + np.repeat(starts - first, lengths)
    flat[2] = np.fromiter(itertools.chain.from_iterable(v for *_, v in writes), np.int32, total)
    return flat


def _writes(flat: np.ndarray, size: int, num_slots: int) -> Writes:
    row, col, value = flat
    return host_value(
        Writes, row=pad(row, size, num_slots), col=pad(col, size, 0), value=pad(value, size, 0)
    )
