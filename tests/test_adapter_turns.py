"""Turns of adapters: few at once, and no request waits for ever."""

import random

import pytest

from jaxrunner.scheduling.adapter_turns import AdapterTurns
from jaxrunner.scheduling.ranks import RankedScheduler
from jaxrunner.scheduling.router import Router
from tests.support.scheduling import check, make, new, step

PINNED = 9


@pytest.mark.parametrize("num_blocks", [40, 12], ids=["room", "preempted"])
def test_adapters_are_few_and_each_request_has_its_turn(num_blocks):
    rng, pinned = random.Random(num_blocks), {PINNED}
    s, pools = make(num_blocks, max_num_seqs=4)
    s.admission.adapters = AdapterTurns(3, pinned)
    num, added, finished = 0, dict[str, int](), set[str]()
    for turn in range(4_000):
        if turn < 3_900 and len(s.requests) < 9:  # a flood of two, and now and then another
            lora_id = rng.choice([1, 1, 1, 2, 2, 0, rng.randrange(3, 8), PINNED])
            name = f"{num}"
            num, added[name] = num + 1, turn
            prompt = [rng.randrange(50) for _ in range(rng.randrange(1, 9))]
            s.add(new(name, prompt, rng.randrange(1, 12), lora_id=lora_id))
        if rng.random() < 0.05 and s.requests:
            s.finish([rng.choice([*s.requests])], "abort")
        step(s)
        running = {r.lora_id for r in s.running if r.lora_id}
        assert len(running | pinned) <= 3
        finished |= added.keys() - s.requests.keys()
        late = [name for name in s.requests if turn - added[name] > 250]
        assert not late, f"{late} wait since {[added[name] for name in late]}, it is {turn}"
    check(s, pools)
    assert not s.requests and len(finished) == num > 800


def test_others_start_while_one_waits_for_a_place():
    s, _ = make(max_num_seqs=4)
    s.admission.adapters = turns = AdapterTurns(1, set())
    for name, lora_id in dict(a=1, b=2, c=1, d=0).items():
        s.add(new(name, 2, 6, lora_id=lora_id))
    assert set(step(s).requests) == {"a", "d"}  # c would keep b waiting
    assert not s.admission.may_start and s.schedule(2).num_steps == 2
    s.finish(["a"], "abort")
    assert set(step(s).requests) == {"b", "d"} and not turns.admits(s.requests["c"])


def test_a_place_that_one_data_rank_frees_is_another_ones():
    """Not in the midst of several steps, of which all ranks take as many."""
    made, turns = [make(max_num_seqs=2)[0] for _ in range(2)], AdapterTurns(1, set())
    for scheduler in made:
        scheduler.admission.adapters = turns
    s = RankedScheduler(made, Router(2, block_size=4, margin=16, by_prefix=False))
    for name, lora_id in dict(a=1, b=2, c=0, d=0).items():  # b and d are the second one's
        s.add(new(name, 2, 9, lora_id=lora_id))
    assert set(step(s).requests) == {"a", "c", "d"} and not made[1].admission.may_start
    assert s.schedule(2).num_steps == 2
    s.finish(["a"], "abort")
    assert made[1].admission.may_start
    mixed = s.schedule(2)
    assert mixed.num_steps == 1 and {*mixed.requests} >= {"b"}
