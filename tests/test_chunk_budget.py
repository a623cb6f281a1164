"""How many tokens a step takes while requests wait."""

from jaxrunner.scheduling.chunk_budget import MAX_HELD, ChunkBudget
from tests.support.scheduling import make, new, step


def test_prefills_fill_a_size():
    budget = ChunkBudget((16, 64, 256), 256)
    assert budget.next(num_decodes=10, num_due=100) == 64
    assert budget.next(num_decodes=10, num_due=1000) == 256
    assert budget.next(num_decodes=0, num_due=5) == 256  # nothing to wait with


def test_prefills_wait_until_they_fill_a_size_or_long_enough():
    budget = ChunkBudget((16, 64, 256), 256)
    assert [budget.next(100, 150) for _ in range(MAX_HELD)] == [100] * MAX_HELD
    assert budget.next(100, 150) == 256  # padded: it fills none that holds the decodes too
    assert budget.next(100, 150) == 100
    assert budget.next(80, 300) == 256


def test_sizes_over_the_most_are_none():
    assert ChunkBudget((16, 512), 256).next(2, 600) == 16


def test_decodes_with_many_drafts_are_held_to_the_most():
    assert ChunkBudget((16, 32), 32).next(num_decodes=40, num_due=60) == 32


def test_a_waiting_prompt_is_computed_after_some_steps():
    scheduler, _ = make(max_num_seqs=4, max_num_batched_tokens=16, step_sizes=(8, 16))
    for name in "abc":
        scheduler.add(new(name, 2, max_tokens=29))
    step(scheduler)
    scheduler.add(new("d", 2, max_tokens=20))
    scheduler.add(new("e", 2, max_tokens=20))
    waits = next(i for i in range(20) if "d" in step(scheduler).num_scheduled_tokens)
    assert waits == MAX_HELD


def test_nothing_waits_while_there_is_a_slot_for_all():
    scheduler, _ = make(max_num_seqs=4, max_num_batched_tokens=16, step_sizes=(8, 16))
    for name in "abc":
        scheduler.add(new(name, 2))
    step(scheduler)
    scheduler.add(new("d", 2))
    assert step(scheduler).num_scheduled_tokens == {"a": 1, "b": 1, "c": 1, "d": 2}
