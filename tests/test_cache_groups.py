"""What windows free, how long prefixes hit, how many blocks a request can need."""

import itertools
import math
import random

import pytest

from jaxrunner.caches.window import SlidingWindow
from jaxrunner.scheduling.prefix import find_prefix
from tests.support.scheduling import cache_group


def test_window_skips_what_no_later_token_sees():
    group = cache_group(2, window=4)
    assert [group.num_skipped_tokens(n) for n in (0, 3, 4, 5, 7)] == [0, 0, 1, 2, 4]
    assert cache_group(2).num_skipped_tokens(100) == 0


def test_empty_window_is_refused():
    with pytest.raises(ValueError, match="window must be at least 1 token, got 0"):
        cache_group(2, window=0)


@pytest.mark.parametrize(
    ("group", "max_len", "max_tokens", "blocks"),
    [
        (cache_group(4), 100, 16, 25),
        (cache_group(4), 101, 16, 26),
        (cache_group(4, 8), 100, 16, 7),
        (cache_group(4, 8), 21, 16, 6),
        (cache_group(4, 8), 5, 16, 2),
        (cache_group(4, 1), 100, 1, 2),
    ],
    ids=["full", "ragged", "window", "window near length", "short", "smallest"],
)
def test_admission_cap(group, max_len, max_tokens, blocks):
    assert group.max_blocks(max_len, max_tokens) == blocks


@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 8, 30, None])
@pytest.mark.parametrize("max_tokens", [1, 3, 8])
def test_no_request_ever_owns_more_than_the_cap(window, max_tokens):
    group, length = cache_group(4, window), 41
    most = 0
    for start in range(length):
        end = min(start + max_tokens, length)
        first = group.num_skipped_tokens(start) // group.block_size
        most = max(most, group.table_len(end) - first)
    assert most <= group.max_blocks(length, max_tokens) <= group.table_len(length)


@pytest.mark.parametrize(
    ("window", "cached", "limit", "hit"),
    [
        (None, {0, 1, 3}, 20, 8),
        (None, {1, 2}, 20, 0),
        (None, {0, 1, 2}, 11, 8),
        (9, {0, 2, 3}, 20, 16),
        (9, {0, 2}, 20, 4),
        (9, {1}, 20, 0),
        (9, {0, 1, 2, 3, 4}, 20, 20),
        (9, {1, 2, 3}, 15, 12),
        (10, {2, 3}, 20, 0),
        (10, {1, 2, 3}, 20, 16),
        (1, {3}, 20, 16),
    ],
    ids=[
        "run", "hole at the start", "limit", "right-most", "from block 0", "too short",
        "all", "window limit", "ten need three", "ten have three", "window of one",
    ],
)  # fmt: skip
def test_longest_hit(window, cached, limit, hit):
    assert cache_group(4, window).longest_hit(cached.__contains__, limit) == hit


def test_hits_of_two_block_sizes_are_multiples_of_both():
    groups = [cache_group(4), cache_group(8)]
    everything = [lambda i: True, lambda i: True]
    assert [find_prefix(groups, everything, n) for n in (7, 8, 15, 16, 23)] == [0, 8, 8, 16, 16]


def test_miss_of_a_window_shortens_the_hit_of_full_attention():
    groups = [cache_group(4), cache_group(8, window=9)]
    assert find_prefix(groups, [lambda i: i < 7, lambda i: i in (0, 2)], 40) == 24
    assert find_prefix(groups, [lambda i: i < 5, lambda i: i in (0, 2)], 40) == 8
    assert find_prefix(groups, [lambda i: i < 5, lambda i: i == 2], 40) == 0


def test_groups_agree_on_the_longest_prefix():
    rng = random.Random(0)
    hits = 0
    for _ in range(500):
        groups = [
            cache_group(rng.choice([2, 4, 6]), rng.choice([None, 1, 3, 5, 9]))
            for _ in range(rng.randint(1, 3))
        ]
        cached = [{i for i in range(20) if rng.random() < 0.8} for _ in groups]
        limit = rng.randint(0, 40)
        step = math.lcm(*(group.block_size for group in groups))
        fitting = [
            n
            for n in range(0, limit + 1, step)
            if all(usable(g, c, n) for g, c in zip(groups, cached, strict=True))
        ]
        lookups = [c.__contains__ for c in cached]
        assert find_prefix(groups, lookups, limit) == max(fitting)
        hits += max(fitting) > 0
    assert hits > 100


def usable(group, cached, n):
    """Returns whether the last blocks before token `n` that count are there."""
    first = group.num_skipped_tokens(n) // group.block_size
    if group.kind == SlidingWindow(1):
        first = max(0, n // group.block_size - 1)  # one at least, to be called a hit
    return all(i in cached for i in itertools.takewhile(lambda i: i < n / group.block_size,
                                                        itertools.count(first)))  # fmt: skip
