"""A device for tests of the scheduler: it knows of which prefix each KV slot holds the KV.

Before it computes a token it looks at every KV slot that the token attends to: there must be the
KV of this very prefix. So a block that is freed too early, shared wrongly or found before it is
computed fails the step that reads it. A block of states has the number of tokens that its state is
behind, and the names of their prefix and of those that end with a drafted token; unlike KV states
are read before any is written.
"""

from collections.abc import Sequence
import random
from typing import Any

from jaxrunner.caches.cache_group import CacheGroup, has_checkpoints
from jaxrunner.scheduling.request import NewRequest, Request, SchedulerOutput

VOCAB_SIZE = 40


def extend(key: int, token: int) -> int:
    """Returns the name of a prefix that is one token longer."""
    return hash((key, token))


def prefixes(tokens, salt: bytes) -> list[int]:
    """Returns the names of all prefixes of `tokens`; the KV of a token is that of its prefix."""
    keys, key = [], hash(tuple(salt))
    for token in tokens:
        keys.append(key := extend(key, token))
    return keys


def next_token(key: int) -> int:
    return (key >> 5) % VOCAB_SIZE


def ends(outputs: list[int], length: int, max_len: int, stop_ids, min_tokens: int) -> bool:
    """The device's rule, in its own words."""
    return length >= max_len or (outputs[-1] in stop_ids and len(outputs) >= min_tokens)


def alone(request: Request) -> list[int]:
    """Returns the outputs of a request that has the device for itself."""
    prompt, outputs = request.prompt_token_ids, []
    key = prefixes(prompt, request.cache_salt)[-1]
    while True:
        outputs.append(next_token(key))
        length = len(prompt) + len(outputs)
        if ends(outputs, length, request.max_len, request.stop_ids, request.params.min_tokens):
            return outputs
        key = extend(key, outputs[-1])


class Row:
    """A request as the device sees it."""

    def __init__(self, new: NewRequest, salt: bytes):
        self.new, self.tokens, self.salt = new, list(new.token_ids), salt
        self.keys = prefixes(self.tokens, salt)
        self.tables = [list(ids) for ids in new.block_ids]
        self.num_computed, self.done = new.num_computed, False
        self.drafts: list[int] = []  # behind `tokens`, not yet verified

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.keys.append(extend(self.keys[-1], token))
        new, outputs = self.new, self.tokens[self.new.prompt_len :]
        length, least = len(self.tokens), self.new.params.min_tokens
        self.done = ends(outputs, length, new.max_len, new.stop_ids, least)

    def planned_keys(self) -> list[int]:
        """Returns the names of all prefixes, those with drafts too."""
        keys = list(self.keys)
        for token in self.drafts:
            keys.append(extend(keys[-1], token))
        return keys


class Device:
    """Executes steps: table updates, then all writes, then all reads, then samples."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        max_num_seqs: int,
        num_drafts: int = 0,
    ):
        self.num_verified = 1 + num_drafts
        self.rng = random.Random(5)
        self.num_accepted = self.num_rejected = 0
        self.num_handed_on = 0  # states that went on in another block
        self.groups, self.max_num_seqs = groups, max_num_seqs
        self.rows: dict[str, Row] = {}
        sizes = [(group.num_blocks or num_blocks) * group.block_size for group in groups]
        self.kv: list[list[Any]] = [[None] * size for size in sizes]
        self.num_no_ops = 0  # requests that had ended before a step that was to compute them

    def run(self, output: SchedulerOutput) -> dict[str, list[int]]:
        for request_id in output.finished_req_ids | output.preempted_req_ids:
            self.rows.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.request_id not in self.rows
            self.rows[new.request_id] = Row(new, output.requests[new.request_id].cache_salt)
            for g, (source, to) in enumerate(new.copies):
                size = self.groups[g].block_size
                held = self.kv[g][source * size : (source + 1) * size]
                self.kv[g][to * size : (to + 1) * size] = held
        assert len(self.rows) <= self.max_num_seqs
        for request_id, ids in output.new_block_ids.items():
            for table, blocks in zip(self.rows[request_id].tables, ids, strict=True):
                table.extend(blocks)
        counts = output.num_scheduled_tokens
        self.num_no_ops += sum(self.rows[r].done for r in counts)
        sampled: dict[str, list[int]] = {r: [] for r in counts}
        for _ in range(output.num_steps):
            several = {r: 1 + output.num_drafts.get(r, 0) for r in counts}
            tokens = counts if output.num_steps == 1 else several
            rows = [(r, self.rows[r], n) for r, n in tokens.items() if not self.rows[r].done]
            for _, row, n in rows:
                self.write(row, n)
            for _, row, n in rows:
                self.read(row, n)
            for r, row, n in rows:
                new = self.sample(row, n, output.num_proposed)
                assert not new or len(new) <= 1 + output.num_drafts.get(r, 0)
                sampled[r] += new
        return sampled

    def write(self, row: Row, n: int) -> None:
        keys, end = row.planned_keys(), row.num_computed + n
        assert end <= len(keys), "a token that does not exist"
        assert end < row.new.max_len, "a token behind the last one"
        for g, group in enumerate(self.groups):
            if has_checkpoints([group.kind]):
                self.read_state(row, g, group)
                continue
            for position in range(row.num_computed, row.num_computed + n):
                self.kv[g][self.slot(row, g, group, position)] = keys[position]

    def read(self, row: Row, n: int) -> None:
        """Checks what the first to the last of `n` tokens see."""
        keys = row.planned_keys()
        for g, group in enumerate(self.groups):
            if has_checkpoints([group.kind]):
                self.write_state(row, g, group, n)
                continue
            window = getattr(group.kind, "window", None)
            first = 0 if window is None else max(0, row.num_computed - window + 1)
            for position in range(first, row.num_computed + n):
                held = self.kv[g][self.slot(row, g, group, position)]
                assert held == keys[position], f"foreign KV at {position} in group {g}"

    def read_state(self, row: Row, g: int, group: CacheGroup) -> None:
        """Checks the state before the row's tokens, while no row has written any."""
        if count := row.num_computed:
            held = self.kv[g][self.block_start(row, g, group, count - 1)]
            assert held is not None, f"no state of {count} tokens in group {g}"
            behind, keys = held
            assert 0 <= count - behind < len(keys), "inputs that were not kept"
            assert keys[count - behind] == row.keys[count - 1], f"a foreign state in group {g}"

    def write_state(self, row: Row, g: int, group: CacheGroup, n: int) -> None:
        """Writes the state behind the first of tokens that may be drafts, with these as inputs, or
        the state behind a chunk."""
        first, size, keys = row.num_computed, group.block_size, row.planned_keys()
        self.num_handed_on += 0 < first == first // size * size
        if n <= self.num_verified:
            for position in range(first, first + n):
                at = self.block_start(row, g, group, position)
                self.kv[g][at] = first + 1, keys[first : first + n]
            return
        assert first // size == (first + n - 1) // size, "a checkpoint is passed over"
        at = self.block_start(row, g, group, first)
        self.kv[g][at] = first + n, [keys[first + n - 1]]

    def block_start(self, row: Row, g: int, group: CacheGroup, position: int) -> int:
        """Returns where the block of a position begins, which has one state."""
        return self.slot(row, g, group, position // group.block_size * group.block_size)

    def slot(self, row: Row, g: int, group: CacheGroup, position: int) -> int:
        block = row.tables[g][position // group.block_size]
        assert 0 <= block < len(self.kv[g]) // group.block_size, "the null block is read"
        return block * group.block_size + position % group.block_size

    def sample(self, row: Row, n: int, num_proposed: int) -> list[int]:
        """Keeps the drafts that are what it samples, and the token behind them; proposes more."""
        end, known = row.num_computed + n, len(row.tokens)
        row.num_computed = end
        if end < known:
            return []
        verified = row.drafts[: end - known]
        for token in (*verified, None):
            row.append(next_token(row.keys[-1]))
            accepted = token == row.tokens[-1]
            self.num_accepted += accepted
            self.num_rejected += token is not None and not accepted
            if row.done or not accepted:
                break
        row.num_computed = len(row.tokens) - 1
        self.propose(row, num_proposed)
        return row.tokens[known:]

    def propose(self, row: Row, num_drafts: int) -> None:
        """Drafts what follows, each token right three times of four."""
        row.drafts, keys = [], row.keys[-1:]
        for _ in range(num_drafts):
            right = next_token(keys[-1])
            row.drafts.append(right if self.rng.random() < 0.75 else (right + 1) % VOCAB_SIZE)
            keys.append(extend(keys[-1], row.drafts[-1]))
