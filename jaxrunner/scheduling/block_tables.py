"""The block tables of requests, in every cache group: prefix hits, growth, windows, release."""

from collections.abc import Mapping, Sequence
import functools
from typing import NamedTuple

from jaxrunner.caches.cache_group import CacheGroup, reads_whole
from jaxrunner.scheduling.block_pool import BlockPool, block_hashes, root_hash
from jaxrunner.scheduling.prefix import find_prefix
from jaxrunner.scheduling.request import NEVER, Request
from jaxrunner.scheduling.state_pool import StatePool
from jaxrunner.scheduling.stateful import Stateful


class Hit(NamedTuple):
    """A cached prefix: its length in tokens, and the tables that hold it, by cache group."""

    num_tokens: int
    blocks: tuple[list[int], ...]  # null blocks where no later token attends
    tail: tuple[int, ...] = ()  # blocks to copy, whose first tokens end the prefix


class BlockTables(Stateful):
    """Writes `blocks` and `block_hashes` of requests; `pools` count references to blocks."""

    SAVED = ("weights_version",)

    def __init__(
        self, groups: Sequence[CacheGroup], pools: Sequence[BlockPool], *, lookahead: int = 0,
        max_model_len: int = NEVER,
    ):  # fmt: skip
        """lookahead: tokens behind those that a request computes whose keys a drafter writes.
        max_model_len: the most tokens of a request.
        """
        self.lookahead, self._max_model_len = lookahead, max_model_len
        self._groups = tuple(zip(groups, pools, strict=True))
        # Whether running requests free blocks, those outside their windows.
        self.give_back = any(g.num_skipped_tokens(max_model_len) >= g.block_size for g in groups)
        self.whole_prompts = reads_whole(group.kind for group in groups)
        self._share_starts = all(group.kind.has_prefixes for group in groups)
        self._caching = [(g, pool) for g, pool in enumerate(pools) if pool.enable_caching]
        self._states = [pool for pool in pools if isinstance(pool, StatePool)]
        # Tokens between ends of chunks that are checkpoints of states; 0 where there are none.
        intervals = (pool.block_size for pool in self._states if pool.enable_caching)
        self.checkpoint_interval = next(intervals, 0)
        self.weights_version = 0  # blocks computed under another version are not found
        self.lora_versions: Mapping[int, int] = {}  # likewise of adapters, by their ids
        for group, pool in self._groups:
            assert group.block_size == pool.block_size, "a pool and its group differ"

    def check_size(self, max_tokens: int) -> None:
        """Checks that the pools hold one request; max_tokens: the most tokens of a step.

        Raises:
          ValueError: a pool does not.
        """
        max_model_len = self._max_model_len
        for group, pool in self._groups:
            needed = group.max_blocks(max_model_len, max_tokens + self.lookahead)
            size = group.block_size
            if pool.num_blocks < needed:
                raise ValueError(
                    f"num_blocks={pool.num_blocks} holds {pool.num_blocks * size} tokens, one "
                    f"request of max_model_len={max_model_len} needs {needed * size}: "
                    "raise num_blocks or lower max_model_len"
                )

    @property
    def has_states(self) -> bool:
        """Whether a cache group has recurrent states, whose prefixes end at checkpoints only."""
        return bool(self._states)

    def begin_step(self) -> None:
        """Lets requests find the states that earlier planned steps write."""
        for pool in self._states:
            pool.begin_step()

    def until_checkpoint(self, num_computed: int, n: int) -> int:
        """Returns how many of a chunk's `n` tokens come before the next checkpoint of states."""
        return min(n, self.checkpoint_interval - num_computed % self.checkpoint_interval)

    def find(self, request: Request) -> Hit:
        """Returns the longest cached prefix of a request that leaves a token to compute."""
        if not self._caching:
            return Hit(0, tuple([] for _ in self._groups))
        # Versions only grow, so any change changes the sum.
        version = self.weights_version + self.lora_versions.get(request.lora_id, 0)
        if request.weights_version != version:
            request.block_hashes, request.weights_version = (), version
        tokens = request.token_ids
        self._extend_hashes(request)
        lookups = [
            functools.partial(_find_block, pool, hashes, tokens)
            for (_, pool), hashes in zip(self._groups, request.block_hashes, strict=True)
        ]
        groups = [group for group, _ in self._groups]
        cached = [functools.partial(_is_cached, lookup) for lookup in lookups]
        num_tokens = find_prefix(groups, cached, min(len(tokens) - 1, request.cache_limit))
        tables = []
        for (group, pool), lookup in zip(self._groups, lookups, strict=True):
            skipped = group.num_skipped_tokens(num_tokens) // group.block_size
            seen = range(skipped, group.table_len(num_tokens))
            tables.append([pool.null_block] * skipped + [lookup(i) for i in seen])
        return self._with_tail(request, tokens, Hit(num_tokens, tuple(tables)))

    def _with_tail(self, request: Request, tokens: Sequence[int], hit: Hit) -> Hit:
        """Lengthens a hit by the start of a block, which another request may still write."""
        if not self._share_starts:
            return hit
        start, limit = hit.num_tokens, min(len(tokens) - 1, request.cache_limit)
        found = []
        for (_, pool), hashes in zip(self._groups, request.block_hashes, strict=True):
            parent = hashes[start // pool.block_size - 1] if start else root_hash(_salt(request))
            found.append(pool.lookup_tail(parent, tokens[start : start + pool.block_size]))
        count = min(limit - start, *(n for n, _ in found))
        return Hit(start + count, hit.blocks, tuple(b for _, b in found)) if count > 0 else hit

    def copies(self, request: Request, hit: Hit) -> tuple[tuple[int, int], ...]:
        """Returns the blocks to copy, (from, to) by cache group, for a request with this hit."""
        if not hit.tail:
            return ()
        to = [table[len(blocks)] for table, blocks in zip(request.blocks, hit.blocks, strict=True)]
        return tuple(zip(hit.tail, to, strict=True))

    def whole(self, hit: Hit) -> Hit:
        """Returns a hit without the tokens that are in blocks to copy."""
        size = self._groups[0][0].block_size
        return Hit(size * len(hit.blocks[0]), hit.blocks) if hit.tail else hit

    def lengthened(self, hit: Hit, num_tokens: int) -> Hit:
        """Returns a longer hit, of `num_tokens`, whose further blocks are filled remotely."""
        tables = []
        for (group, pool), table in zip(self._groups, hit.blocks, strict=True):
            skipped = group.num_skipped_tokens(num_tokens) // group.block_size
            tables.append([pool.null_block] * skipped + table[skipped:])
        return Hit(num_tokens, tuple(tables))

    def end_of_drafts(self, request: Request, num_computed: int) -> int:
        """Returns the tokens for which a step that computes `num_computed` needs blocks."""
        return max(num_computed, min(num_computed + self.lookahead, request.max_len))

    def fits(self, request: Request, hit: Hit, max_tokens: int) -> bool:
        """Whether the free blocks hold all known tokens of a request beside the hit.

        max_tokens: the most tokens of a step.
        """
        end = self.end_of_drafts(request, request.num_tokens)
        for (group, pool), table in zip(self._groups, hit.blocks, strict=True):
            nulls = table.count(pool.null_block)
            most = group.max_blocks(end, max_tokens + self.lookahead)
            owned = min(most, group.table_len(end) - nulls)
            in_use = sum(not pool.is_free(block) for block in table) - nulls
            if owned - in_use > pool.num_free:
                return False
        return True

    def have_room(self, requests: Sequence[Request], lengths: Sequence[int]) -> bool:
        """Whether the free blocks suffice for requests to grow to `lengths`, in tokens."""
        pairs = zip(requests, lengths, strict=True)
        lacking = [(request, n) for request, n in pairs if n > request.num_held]
        for g, (group, pool) in enumerate(self._groups):
            new = (max(0, group.table_len(n) - len(r.blocks[g])) for r, n in lacking)
            if sum(new) > pool.num_free:
                return False
        return True

    def attach(self, request: Request, hit: Hit) -> None:
        """Makes a hit the block tables of a request without tables."""
        for (_, pool), table in zip(self._groups, hit.blocks, strict=True):
            pool.share(table)
        request.blocks = tuple(list(table) for table in hit.blocks)

    def extend(self, request: Request, num_tokens: int) -> tuple[list[int], ...] | None:
        """Lengthens a request's tables to hold `num_tokens`.

        Returns the new blocks by cache group; None, and no change, where too few are free.
        """
        wanted = []
        for (group, pool), table in zip(self._groups, request.blocks, strict=True):
            wanted.append(max(0, group.table_len(num_tokens) - len(table)))
            if wanted[-1] > pool.num_free:
                return None
        pools = [pool for _, pool in self._groups]
        new = tuple(pool.take(n) for pool, n in zip(pools, wanted, strict=True))
        for table, blocks in zip(request.blocks, new, strict=True):
            table.extend(blocks)
        rooms = zip(pools, request.blocks, strict=True)
        request.num_held = min(pool.block_size * len(table) for pool, table in rooms)
        return new

    def publish(self, request: Request, num_tokens: int) -> None:
        """Lets others share full blocks of the first `num_tokens`, known and launched."""
        if num_tokens < request.full_len:
            return
        sizes = [pool.block_size for _, pool in self._caching]
        request.full_len = min((num_tokens // n * n + n for n in sizes), default=NEVER)
        for (g, pool), size in zip(self._caching, sizes, strict=True):
            table = request.blocks[g]
            # Published blocks, and null ones before them, are a prefix of the table.
            start = end = num_tokens // size
            while start > 0 and not pool.is_published(table[start - 1]):
                if table[start - 1] == pool.null_block:
                    break
                start -= 1
            if start < end:
                self._extend_hashes(request)
            for i in range(start, end):
                tokens = _slice(request, i * size, (i + 1) * size)
                pool.publish(table[i], request.block_hashes[g][i], tokens)

    def publish_tail(self, request: Request, num_tokens: int) -> None:
        """Lets others copy the last, partial block of a request's first `num_tokens`.

        Unlike for `publish`, an earlier step must have been launched with these tokens.
        """
        if not (request.blocks and num_tokens and self._caching and self._share_starts):
            return
        self._extend_hashes(request)
        for (_, pool), table, hashes in zip(
            self._groups, request.blocks, request.block_hashes, strict=True
        ):
            i = (num_tokens - 1) // pool.block_size
            tokens = _slice(request, i * pool.block_size, num_tokens)
            if table[i] != pool.null_block:
                parent = hashes[i - 1] if i else root_hash(_salt(request))
                pool.publish_tail(table[i], parent, tokens)

    def drop_skipped(self, request: Request, num_computed: int) -> None:
        """Frees the blocks that no token after the first `num_computed` sees."""
        for (group, pool), table in zip(self._groups, request.blocks, strict=True):
            end = group.num_skipped_tokens(num_computed) // group.block_size
            start = end
            while start > 0 and table[start - 1] != pool.null_block:
                start -= 1
            if start < end:
                self.publish(request, num_computed)
                pool.release(table[start:end])
                table[start:end] = [pool.null_block] * (end - start)

    def release(self, request: Request) -> None:
        """Frees all blocks of a request."""
        for (_, pool), table in zip(self._groups, request.blocks, strict=True):
            pool.release(table)
        request.blocks, request.num_held, request.full_len = (), 0, 0

    def reset(self) -> bool:
        """Forgets all prefixes. Returns False, and changes nothing, while a block is in use."""
        pools = [pool for _, pool in self._groups]
        idle = all(pool.num_free == pool.num_blocks for pool in pools)
        return idle and all(pool.reset() for pool in pools)

    def _extend_hashes(self, request: Request) -> None:
        request.block_hashes = request.block_hashes or tuple([] for _ in self._groups)
        for (_, pool), hashes in zip(self._groups, request.block_hashes, strict=True):
            start, size = len(hashes) * pool.block_size, pool.block_size
            if request.num_tokens >= start + size:
                parent = hashes[-1] if hashes else root_hash(_salt(request))
                tokens = _slice(request, start, request.num_tokens)
                hashes += block_hashes(tokens, size, group=pool.group, parent=parent)


def _salt(request: Request) -> bytes:
    return b"%d %s" % (request.weights_version, request.cache_salt)


def _find_block(
    pool: BlockPool, hashes: Sequence[bytes], tokens: Sequence[int], i: int
) -> int | None:
    size = pool.block_size
    return pool.lookup(hashes[i], tokens[i * size : (i + 1) * size])


def _is_cached(lookup: functools.partial, i: int) -> bool:
    return lookup(i) is not None


def _slice(request: Request, start: int, end: int) -> list[int]:
    """Returns `request.token_ids[start:end]` without joining prompt and outputs."""
    prompt, n = request.prompt_token_ids, len(request.prompt_token_ids)
    return prompt[start:end] + request.output_token_ids[max(0, start - n) : max(0, end - n)]
