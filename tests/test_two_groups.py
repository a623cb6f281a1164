"""Cache groups of their own sizes: each has its own table, which only grows."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxrunner import step
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import paged
from jaxrunner.program.program import Program
from jaxrunner.runner.request_table import RequestTable
from tests.support import scheduling, tiny

SIZES, NUM_BLOCKS = (4, 8), 40


def places(tables: list[list[int]], count: int) -> list[list[int]]:
    """Returns where the first `count` tokens go in the cache of each group."""
    at = jnp.arange(32)  # one shape
    found = []
    for table, size in zip(tables, SIZES, strict=True):
        blocks = jnp.array([(table + [NUM_BLOCKS] * 8)[:8]])
        row = jnp.where(at < count, 0, 1)
        found.append(step.cache_index(blocks, row, at, (NUM_BLOCKS, size)).tolist()[:count])
    return found


@pytest.mark.parametrize("neighbours", [1, 2])
def test_one_position_has_a_place_in_each_group_and_keeps_it(neighbours):
    scheduler, pools = scheduling.make(NUM_BLOCKS, sizes=SIZES, windows=(None, None))
    for name in "xy"[:neighbours]:
        scheduler.add(scheduling.new(name, 5, 20))
    scheduler.add(scheduling.new("a", 19, 12))
    tables, before, computed = [[], []], [[], []], 0
    while scheduler.has_unfinished:
        output = scheduling.step(scheduler)
        new = [r.block_ids for r in output.scheduled_new_reqs if r.request_id == "a"]
        for gained in [*new, *filter(None, [output.new_block_ids.get("a")])]:
            for table, ids in zip(tables, gained, strict=True):
                table += ids
        computed += output.num_scheduled_tokens.get("a", 0)
        now = places(tables, computed)
        for was, of_group, table, size in zip(before, now, tables, SIZES, strict=True):
            assert of_group[: len(was)] == was
            want = [table[p // size] * size + p % size for p in range(computed)]
            assert of_group == want and len(set(of_group)) == computed
        before = now
        scheduling.check(scheduler, pools)
    assert computed == 30 and [len(table) for table in tables] == [8, 4]
    assert before[0] != before[1]


def test_blocks_are_written_behind_those_that_are_there():
    config = replace(tiny.config(), windows=(None, 5))
    slots = RequestTable(Program(llama, config, tiny.engine_config(), paged))
    new = replace(tiny.new_request("a", range(9), blocks=[]), block_ids=([0, 1, 2], [7, 8, 9, 3]))
    slot, ends = slots.add(new), [3, 4]
    for gained in (([10], [11, 12]), ([], [13]), ([14, 15, 16], [])):
        for g, [write] in enumerate(slots.append_blocks({"a": gained})):
            assert write == (slot, ends[g], gained[g])
            ends[g] += len(gained[g])
    assert ends == [7, 7]
