"""How many tokens a step takes while requests wait."""

from typing import Any

from jaxrunner.scheduling.chunk_budget import STEPS, ChunkBudget
from tests.support.scheduling import make, new, step


def test_prompts_are_spread_over_steps():
    budget = ChunkBudget((16, 64, 256), 256)
    assert budget.spread(num_decodes=10, num_due=10 + STEPS * 6) == 16
    assert budget.spread(num_decodes=10, num_due=10 + STEPS * 6 + 1) == 64
    assert budget.spread(num_decodes=0, num_due=5) == 16
    assert budget.spread(num_decodes=100, num_due=101) == 256
    assert budget.spread(num_decodes=0, num_due=10_000) == 256


def test_sizes_over_the_most_are_none():
    assert ChunkBudget((16, 512), 256).spread(20, 600) == 256


def test_decodes_with_many_drafts_are_held_to_the_most():
    assert ChunkBudget((16, 32), 32).spread(num_decodes=40, num_due=60) == 32


def test_requests_that_end_together_let_others_start_one_after_the_other():
    sizes = (8, 16, 64)
    scheduler, _ = make(200, max_num_seqs=4, max_num_batched_tokens=64, step_sizes=sizes)
    for name in "abcdefghi":
        scheduler.add(new(name, 15, max_tokens=3))
    while (num := scheduler.num_waiting) > 4:
        assert sum(step(scheduler).num_scheduled_tokens.values()) == 8
        assert scheduler.num_waiting >= num - 1


def test_nothing_waits_while_there_is_a_slot_for_all():
    scheduler, _ = make(max_num_seqs=4, max_num_batched_tokens=16, step_sizes=(8, 16))
    for name in "abc":
        scheduler.add(new(name, 2))
    step(scheduler)
    scheduler.add(new("d", 2))
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 2}


def steps_of(budget, sizes, num_due):
    """Returns the padded sizes of a lone prompt's steps."""
    steps = []
    while num_due > 0:
        n = min(num_due, budget.least_padded(0, num_due))
        steps.append(min(size for size in sizes if size >= n))
        num_due -= n
    return steps


def test_a_prompt_takes_the_steps_that_cost_least():
    sizes, cost = (32, 256, 1024), 32
    budget = ChunkBudget(sizes, 1024, cost)
    assert steps_of(budget, sizes, 1024) == [1024]
    assert steps_of(budget, sizes, 800) == [256, 256, 256, 32]
    assert steps_of(budget, sizes, 300) == [256, 32, 32]
    least = [0]  # cost of the best steps of all, by their tokens
    for num_due in range(1, 3000):
        least.append(min(least[max(num_due - s, 0)] + s + cost for s in sizes))
        took = sum(size + cost for size in steps_of(budget, sizes, num_due))
        assert took == least[num_due]


def test_tokens_of_decodes_leave_room_for_a_prompt_s():
    budget = ChunkBudget((32, 256), 256, 32)
    assert budget.least_padded(num_decodes=32, num_due=40) == 256  # not 32, without the prompt
    assert budget.least_padded(num_decodes=8, num_due=8) == 256  # a step of decodes alone


def test_a_prompt_is_cut_where_padding_costs():
    sizes: dict[str, Any] = dict(max_num_seqs=4, max_num_batched_tokens=64, step_sizes=(4, 16, 64))
    for step_cost, want in ((0, [22]), (1, [16, 4, 2])):
        scheduler, _ = make(**sizes, step_cost=step_cost)
        scheduler.add(new("a", 22))
        counts = [step(scheduler).num_scheduled_tokens["a"] for _ in want]
        assert counts == want
