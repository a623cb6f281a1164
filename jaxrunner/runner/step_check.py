"""Checks the steps of a host's own scheduler, before anything changes.

The device trusts the steps that it is sent: a token without a block would be written into another
request's. So a runner keeps of each request what must hold of its next step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxrunner.api.validation import shown
from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.program.program import Program
from jaxrunner.runner.step_fields import check_fields, check_ints, check_new
from jaxrunner.scheduling.request import NewRequest, SchedulerOutput

Tables = tuple[tuple[int, ...], ...]  # blocks by cache group; N where no later token looks


class Row(NamedTuple):
    """A request at work: lengths as if it had not ended before `max_len`, and its blocks."""

    known: int  # tokens once all steps so far are done
    computed: int
    max_len: int
    tables: Tables
    lora_id: int = 0

    @property
    def missing(self) -> int:
        """Tokens that can be computed next."""
        return self.known - self.computed if self.known < self.max_len else 0


class StepCheck:
    """The requests of a runner, as the checked steps have left them."""

    def __init__(self, program: Program, adapters: DeviceAdapters | None = None):
        self._program, self._adapters = program, adapters
        self._groups = program.cache_groups
        self._rows: dict[str, Row] = {}
        self._users = tuple(Counter[int]() for _ in self._groups)  # requests that have a block

    def copy(self) -> "StepCheck":
        """Returns one of the same requests, which go their own way."""
        other = StepCheck(self._program, self._adapters)
        other._rows, other._users = dict(self._rows), tuple(map(Counter, self._users))
        return other

    def take(self, output: SchedulerOutput, *, in_two: bool = False) -> None:
        """Checks a step, and counts it as done. in_two: in two launches, of `execute_model`.

        Raises:
          TypeError, ValueError: it contradicts itself or the steps before; names the field.
          RuntimeError: more requests than there are slots, or adapters than there are places.
        """
        check_fields(output)
        if in_two and output.num_steps > 1:
            raise ValueError(f"num_steps={output.num_steps} steps are one launch: call step")
        step = _Step(self._program, self._groups, self._rows, self._users)
        step.remove([*output.finished_req_ids, *output.preempted_req_ids])
        step.remove(new.request_id for new in output.scheduled_new_reqs)
        for request_id, blocks in output.new_block_ids.items():
            step.append(request_id, blocks)
        for i, new in enumerate(output.scheduled_new_reqs):
            step.admit(f"scheduled_new_reqs[{i}]", new)
        step.advance(output)
        if self._adapters is not None:
            self._adapters.check({row.lora_id for row in step.rows.values()} - {0})
        self._rows = step.rows
        for users, change in zip(self._users, step.changes, strict=True):
            for block, count in change.items():
                users[block] += count
                if not users[block]:
                    del users[block]


class _Step:
    """The rows of requests as they change in one step."""

    def __init__(
        self,
        program: Program,
        groups: Sequence[CacheGroup],
        rows: Mapping[str, Row],
        users: Sequence[Counter[int]],
    ):
        self._program, self._groups, self._users = program, groups, users
        self._engine, self.rows = program.engine, dict(rows)
        self.changes = tuple(Counter[int]() for _ in groups)  # of the requests that have a block

    def remove(self, request_ids: Iterable[str]) -> None:
        """Takes requests off; unknown ids are ignored."""
        for request_id in request_ids:
            row = self.rows.pop(request_id, None)
            for g, table in enumerate(row.tables if row is not None else ()):
                self._count(g, table, -1)

    def append(self, request_id: str, blocks: tuple[list[int], ...]) -> None:
        """Lengthens the tables of a request that runs."""
        name = f"new_block_ids[{shown(request_id)}]"
        row = self.rows.get(request_id)
        if row is None:
            raise ValueError(
                f"{name} is of a request that does not run: new ones have all their blocks in "
                "block_ids"
            )
        tables = self._tables(name, blocks, null=False)
        for g, table in enumerate(tables):
            self._check_own(f"{name}[{g}]", g, table, 0)
            self._count(g, table, 1)
        joined = tuple(old + new for old, new in zip(row.tables, tables, strict=True))
        self._check_lengths(name, joined)
        self.rows[request_id] = row._replace(tables=joined)

    def admit(self, where: str, new: NewRequest) -> None:
        """Adds a request."""
        if new.request_id in self.rows:
            raise ValueError(f"{where}.request_id={shown(new.request_id)} is there twice")
        if len(self.rows) == (R := self._program.dims["R"]):
            raise RuntimeError(
                f"{where}: the {R} slots (max_num_seqs of each stage) are all taken, request "
                f"{shown(new.request_id)} needs one: finish or preempt a request first"
            )
        check_new(where, new, self._program)
        name, computed = f"{where}.block_ids", new.num_computed
        tables = self._tables(name, new.block_ids, null=True)
        self._check_lengths(name, tables)
        self._check_copies(f"{where}.copies", new)
        for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            skipped = group.num_skipped_tokens(computed) // group.block_size
            if group.num_blocks in table[skipped:]:
                raise ValueError(f"{name}[{g}] has the null block where a token looks")
            self._check_own(f"{name}[{g}]", g, table, _first_written(group, new))
            self._count(g, table, 1)
        self.rows[new.request_id] = Row(
            len(new.token_ids), computed, new.max_len, tables, new.lora_id
        )

    def advance(self, output: SchedulerOutput) -> None:
        """Computes the tokens of the step."""
        counts, num_steps = output.num_scheduled_tokens, output.num_steps
        total, most = sum(counts.values()), self._engine.max_num_batched_tokens
        if (total if num_steps == 1 else len(counts)) > most:
            raise ValueError(
                f"num_scheduled_tokens has {total} tokens, max_num_batched_tokens={most}: "
                "schedule fewer"
            )
        if len(counts) > (rows := self._engine.max_num_seqs):  # in a pipeline there are more slots
            raise ValueError(
                f"num_scheduled_tokens has {len(counts)} requests, max_num_seqs={rows}: schedule "
                "fewer in a step"
            )
        several = self._engine.num_decode_steps
        if num_steps not in (1, several):
            raise ValueError(f"num_steps must be 1 or num_decode_steps={several}, got {num_steps}")
        for request_id, count in counts.items():
            name = f"num_scheduled_tokens[{shown(request_id)}]"
            row = self.rows.get(request_id)
            if row is None:
                raise ValueError(f"{name} is of a request that is not at work: admit it first")
            self.rows[request_id] = self._advanced(name, row, count, num_steps)

    def _advanced(self, name: str, row: Row, count: int, num_steps: int) -> Row:
        if num_steps == 1 and not 0 < count <= row.missing:
            raise ValueError(
                f"{name}={count}, the request misses {row.missing} tokens: schedule no more"
            )
        due = min(num_steps, row.max_len - row.known)
        if num_steps > 1 and (row.missing != 1 or count != due):
            raise ValueError(
                f"{name}={count} must be {due} in num_steps={num_steps} steps, of a request that "
                f"misses 1 token, it misses {row.missing}"
            )
        end = row.computed + count
        for group, table in zip(self._groups, row.tables, strict=True):
            size = group.block_size
            if len(table) * size < end:
                raise ValueError(
                    f"{name}={count} makes {end} tokens, block_ids and new_block_ids have room for "
                    f"{len(table) * size}: give it {-(-end // size) - len(table)} blocks more"
                )
        known = row.known + (count if num_steps > 1 else end == row.known)
        return row._replace(known=known, computed=end, tables=self._seen(row.tables, end))

    def _seen(self, tables: Tables, computed: int):
        """Returns tables in which blocks that no later token sees are null, for others to have."""
        seen = []
        for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            skipped = group.num_skipped_tokens(computed) // group.block_size
            self._count(g, table[:skipped], -1)
            seen.append((group.num_blocks,) * skipped + table[skipped:])
        return tuple(seen)

    def _tables(self, name: str, blocks: tuple[list[int], ...], *, null: bool) -> Tables:
        """Returns blocks by cache group; null: whether these may be the null block."""
        if not isinstance(blocks, tuple) or len(blocks) != len(self._groups):
            raise TypeError(
                f"{name} must be a tuple of {len(self._groups)} lists, one for each cache group, "
                f"got {shown(blocks)}"
            )
        for g, (group, ids) in enumerate(zip(self._groups, blocks, strict=True)):
            check_ints(f"{name}[{g}]", ids, 0, group.num_blocks - (not null))
        return tuple(tuple(map(int, ids)) for ids in blocks)

    def _check_lengths(self, name: str, tables: Tables) -> None:
        length = self._engine.max_model_len
        for g, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            if len(table) > (most := group.table_len(length)):
                raise ValueError(
                    f"{name}[{g}] makes {len(table)} blocks, max_model_len={length} needs {most}: "
                    "give fewer"
                )

    def _check_own(self, name: str, g: int, table: tuple[int, ...], first: int) -> None:
        """Checks that blocks, from the first on that is written, are no other request's."""
        null, users, change = self._groups[g].num_blocks, self._users[g], self.changes[g]
        real = [block for block in table if block != null]
        if len(set(real)) < len(real):
            raise ValueError(f"{name} has a block twice, got {shown(list(table))}: give others")
        for i, block in enumerate(table[first:], first):
            if block != null and users[block] + change[block]:
                raise ValueError(
                    f"{name}[{i}]={block} is a block that a request has already, and would be "
                    "written: give a free one"
                )

    def _check_copies(self, name: str, new: NewRequest) -> None:
        if not isinstance(new.copies, tuple) or len(new.copies) not in (0, len(self._groups)):
            raise TypeError(
                f"{name} must be a pair of blocks for each of {len(self._groups)} cache groups, "
                f"or empty, got {shown(new.copies)}"
            )
        for g, pair in enumerate(new.copies):
            group = self._groups[g]
            check_ints(f"{name}[{g}]", pair, 0, group.num_blocks - 1)
            first = _first_written(group, new)
            if len(pair) != 2 or pair[1] not in new.block_ids[g][first : first + 1]:
                raise ValueError(
                    f"{name}[{g}]={shown(pair)} must be from any block to the one of the last "
                    f"token of num_computed={new.num_computed}"
                )

    def _count(self, g: int, table: tuple[int, ...], change: int) -> None:
        for block in table:
            if block != self._groups[g].num_blocks:
                self.changes[g][block] += change


def _first_written(group: CacheGroup, new: NewRequest) -> int:
    """Returns the first block of a new request that is written; what is copied into is so too."""
    return (new.num_computed - 1 if new.copies else new.num_computed) // group.block_size
