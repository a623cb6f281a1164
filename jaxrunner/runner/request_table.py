"""The host's request table: which request has which slot, and what it needs. Knows no device."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import copy
import functools
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.program.bucket import (
    FEW_STOP_IDS,
    SHORT_LEN,
    AdmitSize,
    Bucket,
    CopySize,
    MultiStepBucket,
    SampleSize,
)
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import admit_sizes, logprob_widths
from jaxrunner.runner.slot import Needs, PendingPromptLogprobs, Slot
from jaxrunner.runner.uploads import (
    Admissions,
    Write,
    block_copies,
    empty_plan,
    flat,
    no_copies,
    plan_holds,
)
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.scheduling.stateful import Stateful

MOST_SHORT = 16  # requests of a step for which it is looked up whether they are short


class RequestTable(Stateful):
    """Slots of running requests, and uploads for them. The slot freed last is reused first."""

    SAVED = ("_free", "_slots", "_unusual", "lora_ids")

    def __init__(self, program: Program):
        self._program = program
        self._free = list(range(program.dims["R"]))
        self._slots: dict[str, Slot] = {}
        self._unusual: set[str] = set()  # requests whose slot is not `is_usual`
        self.lora_ids: dict[str, int] = {}  # by request id, of requests with an adapter
        self._no_plan = functools.cache(functools.partial(empty_plan, program))
        self._packed = Admissions(program)

    def __getitem__(self, request_id: str) -> int:
        return self._slots[request_id].index

    def copy(self) -> "RequestTable":
        """Returns an independent table of the same requests."""
        return copy.deepcopy(self, {id(self._program): self._program})  # which is shared

    def add(self, request: NewRequest) -> int:
        """Gives a request a slot, and returns it; frees that of a request with the same id.

        Raises:
          RuntimeError: no slot is free.
        """
        self.remove(request.request_id)
        if not self._free:
            raise RuntimeError(
                f"the {self._program.dims['R']} slots (max_num_seqs of each stage) are all taken, "
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
        """Records the adapter of a request in a slot, if it has one."""
        if request.lora_id:
            self.lora_ids[request.request_id] = request.lora_id

    @property
    def num_taken(self) -> int:
        """Requests that have a slot."""
        return len(self._slots)

    @property
    def need_single_steps(self) -> bool:
        """Whether a request needs the host between two tokens, so that a launch has one step."""
        return any(self._slots[r].needs.single_steps for r in self._unusual)

    def are_short(self, req_ids: Sequence[str]) -> bool:
        """Whether requests are few, usual, and have blocks for at most `SHORT_LEN` tokens."""
        if len(req_ids) > MOST_SHORT or not self._unusual.isdisjoint(req_ids):
            return False
        return all(
            num * group.block_size <= SHORT_LEN
            for r in req_ids
            for num, group in zip(
                self._slots[r].num_blocks, self._program.cache_groups, strict=True
            )
        )

    def sample_size(self, req_ids: Iterable[str], bucket: Bucket) -> SampleSize:
        """Returns the size of the sampling that these requests need."""
        needs = [self._slots[r].needs for r in self._unusual.intersection(req_ids)]
        columns = max((need.num_logprobs for need in needs), default=0)
        all_rules = any(need.all_rules for need in needs)
        return SampleSize(bucket.num_rows, all_rules, columns, bucket.num_drafts)

    def count_targets(self, counts: Mapping[str, int]) -> tuple[int, int]:
        """Returns the most prompt tokens that get logprobs in a step, and the columns of these.

        counts: tokens that the step computes, by request. Counts these logprobs as done.
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
        tests = (rule.is_requested for rule in self._program.rules)
        all_rules = any(is_requested(params) for is_requested in tests if is_requested)
        whole = columns[0] == self._program.config.vocab_size
        single_steps = whole or params.structured_outputs is not None
        return Needs(all_rules or columns[0] > 0, single_steps, *columns)

    def _width(self, num_logprobs: int | None) -> int:
        widths = logprob_widths(self._program.config.vocab_size)
        if num_logprobs is None:
            return 0
        return widths[-1] if num_logprobs == -1 else next(w for w in widths if w >= num_logprobs)

    def append_blocks(self, new: Mapping[str, tuple[list[int], ...]]) -> tuple[list[Write], ...]:
        """Records new blocks of requests. Returns the writes, by cache group, into block tables."""
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
        """Returns a packed `Plan`.

        counts: tokens of each request, in each of the launch's steps. blocks: writes by group.
        """
        layout, padding = self._no_plan(size)
        vector = padding.copy()
        plan = layout.read(vector)  # views of the vector
        plan.slot[: len(req_ids)] = [self._slots[r].index for r in req_ids]
        plan.num_tokens[: len(req_ids)] = counts
        for writes, w in zip(blocks, plan.blocks, strict=True):
            if writes:
                row, col, value = flat(writes)
                w.row[: row.size], w.col[: row.size], w.value[: row.size] = row, col, value
        return vector

    def room(self, blocks: Sequence[list[Write]], size: Bucket | MultiStepBucket) -> bool:
        """Whether a plan of this size holds these block writes."""
        return plan_holds(self._program, size, blocks)

    def admissions(
        self, new: list[NewRequest], blocks: Sequence[list[Write]]
    ) -> Iterator[tuple[AdmitSize, np.ndarray]]:
        """Yields packed admissions, as many as new requests, their tokens and `blocks` take."""
        tokens = [(self[r.request_id], 0, r.token_ids) for r in new]
        groups = [list(writes) for writes in blocks]
        for r in new:
            for g, ids in enumerate(r.block_ids):
                groups[g].append((self[r.request_id], 0, ids))
        parts = [flat(tokens), *map(flat, groups)]
        longest = max(writes.shape[1] for writes in parts)
        many = any(len(r.stop_row) > FEW_STOP_IDS for r in new)
        wide = many or any(self._slots[r.request_id].needs.all_rules for r in new)
        sizes = [size for size in admit_sizes(self._program) if size.wide >= wide]
        fits = (s for s in sizes if len(new) <= s.num_rows and longest <= s.num_writes)
        size = next(fits, max(sizes, key=lambda s: (s.num_rows, s.num_writes)))
        for i in range(max(-(-len(new) // size.num_rows), -(-longest // size.num_writes))):
            columns = slice(i * size.num_writes, (i + 1) * size.num_writes)
            rows = new[i * size.num_rows : (i + 1) * size.num_rows]
            slots = [self[r.request_id] for r in rows]
            yield size, self._packed.pack(size, slots, rows, [w[:, columns] for w in parts])

    def no_admission(self, size: AdmitSize) -> np.ndarray:
        """Returns a packed admission of padding."""
        none = [flat([])] * (1 + len(self._program.cache_groups))
        return self._packed.pack(size, (), (), none)

    def copies(self, new: list[NewRequest]) -> Iterator[tuple[CopySize, np.ndarray]]:
        """Yields packed block copies of new requests that share the start of a block."""
        return block_copies(self._program, new)

    def no_copies(self, size: CopySize) -> np.ndarray:
        """Returns packed copies of padding."""
        return no_copies(self._program, size)

    def of_ranks(self, req_ids: Iterable[str], values: Iterable[Any]) -> list[list[Any]]:
        """Returns the values of requests for each data rank: here for the only one."""
        return [list(values)]

    def rows(self, req_ids: Sequence[str], num_rows: int) -> tuple[str, ...]:
        """Returns the request of each row."""
        return tuple(req_ids)
