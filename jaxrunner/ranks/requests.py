"""The request tables of data ranks behind the methods of one.

A step is of one size for all ranks; one without requests in it has rows of padding.
"""

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
import itertools
from typing import Any, cast

from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.parallel.mesh import DATA
from jaxrunner.parallel.placement import put
from jaxrunner.program.bucket import AdmitSize, Bucket, CopySize, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.runner.request_table import RequestTable, Write
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.scheduling.stateful import Stateful

Writes = Sequence[Any]  # by rank what a `RequestTable` takes; empty ones for none


def make_requests(program: Program) -> RequestTable:
    """Returns a new table of requests, of all data ranks where there are such."""
    # It has the interface of a table.
    made = RequestTable(program) if program.num_ranks == 1 else RankedRequests(program)
    return cast(RequestTable, made)


class RankedRequests(Stateful):
    """A `RequestTable` for each data rank. Slots count on from rank to rank."""

    SAVED = ("_rank",)  # in a snapshot

    def __init__(self, program: Program):
        self.tables = [RequestTable(program) for _ in range(program.num_ranks)]
        self._rank: dict[str, int] = {}
        self._num_slots = program.dims["R"]
        self._none: tuple[list[Write], ...] = tuple([] for _ in program.cache_groups)
        self._where = None
        if program.mesh is not None and program.is_shared:
            self._where = NamedSharding(program.mesh, PartitionSpec(DATA))

    def __getitem__(self, request_id: str) -> int:
        rank = self._rank[request_id]
        return rank * self._num_slots + self.tables[rank][request_id]

    def copy(self) -> "RankedRequests":
        """Returns tables of the same requests, which go their own way."""
        other = object.__new__(RankedRequests)
        vars(other).update(vars(self))
        other.tables, other._rank = [table.copy() for table in self.tables], dict(self._rank)
        return other

    def add(self, request: NewRequest) -> int:
        """Gives a request a slot of its rank; raises as `RequestTable.add`."""
        self.remove(request.request_id)
        self.tables[request.data_rank].add(request)
        self._rank[request.request_id] = request.data_rank
        return self[request.request_id]

    def remove(self, request_id: str) -> None:
        """Frees a request's slot; an unknown id is ignored."""
        if (rank := self._rank.pop(request_id, None)) is not None:
            self.tables[rank].remove(request_id)

    def note_adapter(self, request: NewRequest) -> None:
        """Notes the adapter of a request that has a slot, if it has one."""
        self.tables[request.data_rank].note_adapter(request)

    @property
    def lora_ids(self) -> Mapping[str, int]:
        """Adapters of the requests that have one, by their ids."""
        return ChainMap(*(table.lora_ids for table in self.tables))

    def are_short(self, req_ids: Sequence[str]) -> bool:
        """Returns False: ranks run no program of short requests."""
        return False

    @property
    def num_taken(self) -> int:
        """Requests that have a slot."""
        return len(self._rank)

    @property
    def need_single_steps(self) -> bool:
        """Whether the host works between the tokens of a request."""
        return any(table.need_single_steps for table in self.tables)

    def of_ranks(self, req_ids: Iterable[str], values: Iterable[Any]) -> list[list[Any]]:
        """Returns what belongs to requests, by the ranks of these."""
        found: list[list[Any]] = [[] for _ in self.tables]
        for req_id, value in zip(req_ids, values, strict=True):
            found[self._rank[req_id]].append(value)
        return found

    def rows(self, req_ids: Sequence[str], num_rows: int) -> tuple[str, ...]:
        """Returns the request of each row of all ranks, `num_rows` of each; "" for padding."""
        own = self.of_ranks(req_ids, req_ids)
        return tuple(
            itertools.chain(*([*ids, *[""] * (num_rows - len(ids))] for ids in own))
        )  # fmt: skip

    def sample_size(self, req_ids: Iterable[str], bucket: Bucket) -> SampleSize:
        """Returns what the draw of these requests needs."""
        ids = list(req_ids)
        sizes = [
            table.sample_size(own, bucket)
            for table, own in zip(self.tables, self.of_ranks(ids, ids), strict=True)
        ]
        columns = max(size.num_logprobs for size in sizes)
        all_rules = any(size.all_rules for size in sizes)
        return sizes[0]._replace(all_rules=all_rules, num_logprobs=columns)

    def count_targets(self, counts: Mapping[str, int]) -> tuple[int, int]:
        """Returns how many prompt tokens' logprobs a step gives of a rank, at most, and columns."""
        parts = [
            {r: n for r, n in counts.items() if self._rank[r] == rank}
            for rank in range(len(self.tables))
        ]
        pairs = [t.count_targets(own) for t, own in zip(self.tables, parts, strict=True)]
        totals, columns = zip(*pairs, strict=True)
        return max(totals), max(columns)

    def append_blocks(self, new: Mapping[str, tuple[list[int], ...]]) -> tuple[Any, ...]:
        """Returns the writes that append blocks, by rank."""
        return tuple(
            table.append_blocks({r: ids for r, ids in new.items() if self._rank[r] == rank})
            for rank, table in enumerate(self.tables)
        )

    def room(self, blocks: Writes, size: Bucket | MultiStepBucket) -> bool:
        """Whether a plan of this size holds these block writes."""
        return all(t.room(own, size) for t, own in zip(self.tables, self._own(blocks), strict=True))

    def plan(
        self, req_ids: Sequence[str], counts: Sequence[int], blocks: Writes,
        size: Bucket | MultiStepBucket,
    ) -> np.ndarray:  # fmt: skip
        """Returns the packed plans of a step, one behind another."""
        parts = zip(
            self.of_ranks(req_ids, req_ids), self.of_ranks(req_ids, counts), self._own(blocks),
            strict=True,
        )  # fmt: skip
        plans = [t.plan(*own, size) for t, own in zip(self.tables, parts, strict=True)]
        return self._upload(plans)

    def admissions(
        self, new: list[NewRequest], blocks: Writes
    ) -> Iterator[tuple[AdmitSize, np.ndarray]]:
        """Returns the packed admissions of new requests and of the given block writes."""
        own = self.of_ranks([r.request_id for r in new], new)
        each = [
            list(table.admissions(*part)) if part[0] or any(part[1]) else []
            for table, part in zip(
                self.tables, zip(own, self._own(blocks), strict=True), strict=True
            )
        ]
        yield from self._joined(each, [t.no_admission for t in self.tables])

    def copies(self, new: list[NewRequest]) -> Iterator[tuple[CopySize, np.ndarray]]:
        """Returns the packed block copies that new requests start from."""
        own = self.of_ranks([r.request_id for r in new], new)
        each = [list(t.copies(part)) for t, part in zip(self.tables, own, strict=True)]
        yield from self._joined(each, [t.no_copies for t in self.tables])

    def _joined(self, each: Sequence[list[tuple[Any, np.ndarray]]], none: Sequence[Any]) -> Any:
        """Yields the parts of ranks by their sizes, ranks without one having nothing to do."""
        for size in dict.fromkeys(size for parts in each for size, _ in parts):
            of_size = ([vector for own, vector in parts if own == size] for parts in each)
            for vectors in itertools.zip_longest(*of_size):
                pairs = zip(vectors, none, strict=True)
                yield size, self._upload([make(size) if x is None else x for x, make in pairs])

    def _upload(self, vectors: list[np.ndarray]) -> Any:
        """Returns the vectors of ranks one behind another; on the devices of several processes,
        each of which has those of its own ranks, where JAX takes none of the host's."""
        whole = np.concatenate(vectors)
        return whole if self._where is None else put(whole, self._where)

    def _own(self, blocks: Writes) -> Sequence[Any]:
        return blocks if any(blocks) else [self._none] * len(self.tables)
