"""Decode attention's plan: who reads which keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.kernels_pallas.attention.decode_attention import decode_attention
from jaxrunner.kernels_pallas.attention.decode_plan import (
    BATCH_INVARIANT,
    CLUSTER,
    DEFAULT,
    TuningConfig,
    cluster_of,
    plan,
)
from jaxrunner.kernels_pallas.attention.query_rows import tile_of
from tests.support.lowering import lowers

HEADS, TABLE = 8, 256


@functools.partial(jax.jit, static_argnames=("cluster", "window", "config"))
def planned(lens, blocks, num, *, cluster, window, config=DEFAULT):
    sizes = (9, HEADS, 64, 128), window, config
    several = dict(query_len=4, cluster=cluster)
    return plan(lens, blocks, *sizes, skip_empty=True, num_tokens=num, **several)


@pytest.mark.parametrize("window", [None, 300], ids=["all keys", "window"])
@pytest.mark.parametrize("B, cluster", [(1, 1), (1, 8), (2, 8), (8, 1), (12, 2), (16, 2), (40, 1)])
def test_items_read_each_tile_once(B: int, cluster: int, window: int | None):
    rng = np.random.default_rng()
    for most in (60, 1100, 16000):
        lens = np.where(rng.random(B) < 0.2, 0, rng.integers(1, most, B)).astype(np.int32)
        blocks = rng.integers(0, 99, (B, TABLE), np.int32)
        new = rng.integers(1, 5, B).astype(np.int32)
        rows = map(jnp.asarray, (lens, blocks, new))
        items = planned(*rows, cluster=cluster, window=window)
        row, first, last, num, length, block, head, parts = map(np.asarray, items)
        slots = TuningConfig().num_ctas // (HEADS * cluster)
        # Of clusters of two CTAs, those that run at a time have two items each at most.
        assert row.size == cluster * (B if cluster == CLUSTER else B + slots - 1)
        assert cluster != 2 or B + slots - 1 <= 2 * slots
        # No CTA waits for a part that is its own second item.
        assert parts.max() <= cluster * slots
        if cluster == 1 and slots < B:  # long rows first
            started = row[(row < B) & (head == np.arange(row.size))]
            own = [last[row == r].max() - first[row == r].min() for r in started]
            assert (np.diff(own) <= 0).all()
        for r in range(B):
            mine = np.flatnonzero(row == r)
            tiles = [t for i in mine for t in range(first[i], last[i])]
            start = 0 if window is None else max(int(lens[r]) - window - 3, 0) // 64
            assert tiles == list(range(start, -(-int(lens[r]) // 64)))
            assert (length[mine] == lens[r]).all() and (parts[mine] == mine.size).all()
            assert (num[mine] == new[r]).all() and (head[mine] == mine[:1]).all()
            assert cluster != CLUSTER or mine.size <= cluster
            busy = mine[first[mine] < last[mine]]
            assert (block[busy] == blocks[r, first[busy]]).all()


@pytest.mark.parametrize("window", [None, 300], ids=["all keys", "window"])
@pytest.mark.parametrize("B, cluster", [(1, 1), (2, 8), (8, 1), (40, 1)])
def test_rows_may_be_cut_by_their_own_length_alone(B: int, cluster: int, window: int | None):
    rng = np.random.default_rng(0)
    own, blocks, new = 5000, jnp.zeros((B, TABLE), jnp.int32), jnp.ones(B, jnp.int32)
    sizes: dict[str, Any] = dict(cluster=cluster, window=window, config=BATCH_INVARIANT)
    found = set()
    for most in (60, 1100, 16000):
        lens = rng.integers(0, most, B).astype(np.int32)
        at = rng.integers(B)
        lens[at] = own
        items = planned(jnp.asarray(lens), blocks, new, **sizes)
        assert items.row.size <= cluster * max(4 * B, TuningConfig().num_ctas // HEADS)
        row, first, last, *_, parts = map(np.asarray, items)
        found.add((*first[row == at], *last[row == at], *parts[row == at]))
        for r in range(B):  # each tile is read once
            tiles = [t for i in np.flatnonzero(row == r) for t in range(first[i], last[i])]
            start = 0 if window is None else max(int(lens[r]) - window - 3, 0) // 64
            assert tiles == list(range(start, -(-int(lens[r]) // 64)))
    assert len(found) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("B", [4, 16, 64])
def test_a_row_s_bits_do_not_depend_on_the_others(B: int):
    (H, K, D, S), own = (32, HEADS, 128, 64), 3000
    keys, rng = jax.random.split(jax.random.key(0), 3), np.random.default_rng(0)
    q = jax.random.normal(keys[0], (B, H, D), jnp.bfloat16)
    k, v = (jax.random.normal(key, (TABLE, K, S, D), jnp.bfloat16) for key in keys[1:])
    blocks = jnp.asarray(rng.integers(0, TABLE, (B, 64)), jnp.int32)
    run = jax.jit(functools.partial(decode_attention, scale=D**-0.5, config=BATCH_INVARIANT))
    found = []
    for most in (40, 1000, 4000):
        lens = jnp.asarray(rng.integers(1, most, B), jnp.int32).at[1].set(own)
        found.append(np.asarray(run(q, k, v, blocks, lens)[1].view(jnp.uint16)))
    np.testing.assert_array_equal(found[1:], found[:1] * 2)


@pytest.mark.parametrize("rows", [9, 12, 16])
def test_rows_of_about_one_length_are_not_cut_for_a_second_turn(rows: int):
    lens = np.where(np.arange(16) < rows, 1000 + 10 * np.arange(16), 0).astype(np.int32)
    blocks = jnp.zeros((16, TABLE), jnp.int32)
    num = jnp.ones(16, jnp.int32)
    items = planned(jnp.asarray(lens), blocks, num, cluster=2, window=None)
    assert np.asarray(items.parts)[: 2 * rows].tolist() == [2] * (2 * rows)


@pytest.mark.parametrize("B, M, D, query_len, window, size", [
    (1, 24, 128, 1, None, 8), (2, 24, 128, 4, None, 8), (1, 25, 128, 4, None, 1),
    (1, 128, 128, 1, 1024, 8), (1, 128, 128, 1, 4096, 1), (3, 16, 128, 4, None, 1),
    (8, 16, 128, 4, None, 1), (12, 128, 128, 4, None, 2), (16, 128, 128, 4, None, 2),
    (16, 16, 128, 1, None, 1), (17, 16, 128, 4, None, 1), (1, 16, 128, 16, None, 1),
    (1, 16, 64, 4, None, 8), (1, 16, 80, 4, None, 1), (1, 16, 256, 4, None, 1),
])  # fmt: skip
def test_clusters_are_where_they_gain(
    B: int, M: int, D: int, query_len: int, window: int | None, size: int
):
    q, cache = (B * query_len, 4 * HEADS, D), (99, HEADS, 64, D)
    sizes = q, cache, (B, M), window, query_len
    assert cluster_of(*sizes, TuningConfig()) == size
    assert cluster_of(*sizes, TuningConfig(cluster=0)) == 1
    assert cluster_of(*sizes, BATCH_INVARIANT) == (CLUSTER if size == CLUSTER else 1)
    assert B * HEADS * size <= TuningConfig().num_ctas or size == 1


@pytest.mark.parametrize("query_len, group, pitch", [
    (1, 4, 64), (1, 7, 64), (2, 16, 32), (4, 4, 16), (4, 16, 16), (3, 7, 7), (3, 8, 16), (5, 1, 8),
    (5, 12, 12), (8, 8, 8), (8, 4, 8),
])  # fmt: skip
def test_tokens_lie_apart_where_copies_can_bring_them(query_len: int, group: int, pitch: int):
    tile = tile_of(query_len, group)
    assert tile.pitch == pitch
    assert tile.apart == (query_len == 1 or pitch > group)
    rows = [i * pitch + g for i in range(query_len) for g in range(group)]
    assert len(set(rows)) == len(rows) and max(rows) < 64
    assert tile.lower_halves == all(row % 16 < 8 for row in rows)


@lowers
@pytest.mark.parametrize("changes", [{}, dict(skip_empty=True, weighed=True)])
def test_attention_into_results_of_others_leaves_empty_rows_alone(changes):
    q, kv = (jnp.zeros(shape, jnp.bfloat16) for shape in ((1, 8, 128), (9, 2, 64, 128)))
    given = q, kv, kv, jnp.zeros((1, 3), jnp.int32), jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="with into wants skip_empty alone, got skip_empty="):
        decode_attention(*given, scale=1.0, into=object(), **changes)
