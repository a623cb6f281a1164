"""Steps that lie are refused by name and change nothing; those of our scheduler never are."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.step_check import StepCheck
from jaxrunner.scheduling.request import GrammarOutput, SchedulerOutput
from tests.support import tiny
from tests.support.loads import LOADS
from tests.support.random_driver import Driver

KEPT, TRUE = [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8]


def new(**changes: Any) -> Any:
    request = tiny.new_request("a", TRUE, blocks=[10, 11, 12])
    return replace(request, **changes)


def first(count: Any = 8, **changes: Any) -> SchedulerOutput:
    """Returns the first step of a request."""
    return tiny.scheduled({"a": count}, [new(**changes)])


def later(**changes: Any) -> SchedulerOutput:
    """Returns a step of the request that runs."""
    return replace(tiny.scheduled({"kept": 1}), **changes)


LIES: list[tuple[Any, str]] = [
    (3, "scheduler_output must be a SchedulerOutput, got 3"),
    (first(block_ids=([10],)), "makes 8 tokens, block_ids and new_block_ids have room for 4: give"),
    (first(block_ids=([],)), "give it 2 blocks more"),
    (first(block_ids=([-1, 11],)), r"block_ids\[0\]\[0\]=-1 is out of range"),
    (first(block_ids=([10, 2**40],)), r"block_ids\[0\]\[1\]=1099511627776 is out of range"),
    (first(block_ids=([10, 60],)), r"block_ids\[0\] has the null block where a token looks"),
    (first(block_ids=([10, 10],)), r"block_ids\[0\] has a block twice"),
    (first(block_ids=([10, 1],)), r"block_ids\[0\]\[1\]=1 is a block that a request has already"),
    (
        first(3, num_computed=5, block_ids=([10, 0],)),
        r"\[1\]=0 is a block that a request",
    ),
    (first(block_ids=[[10, 11]]), "block_ids must be a tuple of 1 lists, one for each cache group"),
    (first(block_ids=([10, 11], [10, 11])), "block_ids must be a tuple of 1 lists"),
    (first(block_ids=(None,)), r"block_ids\[0\] must be a list of integers, got None"),
    (first(block_ids=(list(range(10, 23)),)), "makes 13 blocks, max_model_len=48 needs 12"),
    (first(0), r"num_scheduled_tokens\['a'\]=0 is out of range"),
    (first(-1), r"num_scheduled_tokens\['a'\]=-1 is out of range"),
    (first("1"), r"num_scheduled_tokens\['a'\] must be an integer"),
    (first(9), r"num_scheduled_tokens\['a'\]=9, the request misses 8 tokens: schedule no more"),
    (first(1, num_computed=1_000_000), r"\.num_computed=1000000 is out of range"),
    (first(1, num_computed=8), r"\.num_computed=8 is out of range"),
    (first(1, num_computed=-1), r"\.num_computed=-1 is out of range"),
    (first(request_id=3), r"scheduled_new_reqs\[0\]\.request_id must be a string"),
    (first(token_ids=[61] * 8), r"\.token_ids\[0\]=61 is out of range"),
    (first(token_ids=[]), r"\.token_ids has 0 tokens, max_model_len=48 takes 1 to 47"),
    (first(token_ids=None), r"\.token_ids must be a list of integers, got None"),
    (first(prompt_len=9), r"\.prompt_len=9 is out of range"),
    (first(params=np.array([1])), r"\.params must be a SamplingParams, got array"),
    (first(params=SamplingParams(stop_token_ids=[61])), r"\.params: stop_token_ids has 61"),
    (first(seed=2**64), r"\.seed=18446744073709551616 is out of range"),
    (first(max_len=49), r"\.max_len=49 is out of range"),
    (first(stop_ids=0), r"\.stop_ids must be a set of tokens, got 0"),
    (first(stop_ids={2**31}), r"\.stop_ids\[0\]=2147483648 is out of range"),
    (first(eos_token_ids=3), r"\.eos_token_ids must be a set of tokens, got 3"),
    (first(eos_token_ids=(-1,)), r"\.eos_token_ids\[0\]=-1 is out of range"),
    (
        first(stop_ids=set(range(99)), eos_token_ids=(*range(90, 150),)),
        r"stop_ids and eos_token_ids are 150 ids, a request may have 144",
    ),
    (first(cache_salt="a"), r"\.cache_salt must be bytes, got 'a'"),
    (first(prompt_logprobs_start=2**40), r"\.prompt_logprobs_start=1099511627776 is out of range"),
    (first(copies="nan"), r"\.copies must be a pair of blocks for each of 1 cache groups"),
    (first(copies=((0, 1),)), r"\.copies\[0\]=\(0, 1\) must be from any block to the one"),
    (tiny.scheduled({"a": 8}, [new(), new()]), r"reqs\[1\]\.request_id='a' is there twice"),
    (
        tiny.scheduled({}, [new(request_id=f"{i}", block_ids=([10 + i],)) for i in range(5)]),
        r"reqs\[4\]: the 5 slots \(max_num_seqs of each stage\) are all taken, request '4' needs",
    ),
    (later(scheduled_new_reqs=None), "scheduled_new_reqs must be a list, got None"),
    (later(scheduled_new_reqs=[3]), r"scheduled_new_reqs\[0\] must be a NewRequest, got 3"),
    (later(num_scheduled_tokens={"kept": 33}), "has 33 tokens, max_num_batched_tokens=32: sched"),
    (later(num_scheduled_tokens={"kept": 2}), "the request misses 1 tokens: schedule no more"),
    (later(num_scheduled_tokens={"b": 1}), r"\['b'\] is of a request that is not at work: admit"),
    (later(num_scheduled_tokens={3: 1}), "an id of num_scheduled_tokens must be a string, got 3"),
    (later(finished_req_ids="kept"), "finished_req_ids must be a set, got 'kept'"),
    (later(finished_req_ids={"kept"}), r"\['kept'\] is of a request that is not at work"),
    (later(preempted_req_ids={"kept"}), r"preempted_req_ids has \['kept'\], which are scheduled"),
    (later(new_block_ids=None), "new_block_ids must be a dict, got None"),
    (
        later(new_block_ids={"b": ([10],)}),
        r"ids\['b'\] is of a request that does not run",
    ),
    (
        later(new_block_ids={"kept": ([-1],)}),
        r"\['kept'\]\[0\]\[0\]=-1 is out of range",
    ),
    (later(new_block_ids={"kept": ([60],)}), r"\['kept'\]\[0\]\[0\]=60 is out of range"),
    (
        later(new_block_ids={"kept": ([1],)}),
        r"\[0\]\[0\]=1 is a block that a request has",
    ),
    (later(new_block_ids={"kept": [10]}), r"new_block_ids\['kept'\] must be a tuple of 1 lists"),
    (later(num_steps=0), "num_steps=0 is out of range"),
    (later(num_steps=True), "num_steps must be an integer"),
    (later(requests={"kept": 3}), r"requests\['kept'\] must be a Request"),
]

SEVERAL: list[tuple[Any, str]] = [
    (later(num_steps=99), "num_steps must be 1 or num_decode_steps=3, got 99"),
    (later(num_steps=3), r"'kept'\]=1 must be 3 in num_steps=3 steps, of a request that misses 1"),
]


@pytest.fixture(scope="module")
def runner():
    return tiny.runner(num_decode_steps=3)


def status(runner: ModelRunner) -> Any:
    slots = {
        name: value for name, value in vars(runner.requests).items() if isinstance(value, dict)
    }
    return repr(
        (slots, runner.requests._free, runner.requests._unusual, vars(runner._check)["_rows"])
    )


def run(runner: ModelRunner, output: SchedulerOutput) -> list[int]:
    told = runner.step(output).get()
    return told.sampled_token_ids[told.req_ids.index(next(iter(output.num_scheduled_tokens)))]


def test_lies_are_named_and_change_nothing(runner):
    kept = tiny.new_request("kept", KEPT, blocks=[0, 1])
    want = [tiny.generate(runner, request, 3) for request in (kept, new())]
    got = run(runner, tiny.scheduled({"kept": 6}, [kept]))
    before = status(runner)
    lies = [(runner.step, *lie) for lie in [*LIES, *SEVERAL]]
    lies += [(runner.execute_model, *lie) for lie in LIES]
    lies += [(runner.execute_model, lie, "steps are one launch: call step") for lie, _ in SEVERAL]
    for take, lie, message in lies:
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            take(lie)
        assert status(runner) == before
    got += run(runner, later()) + run(runner, later())
    told = run(runner, first()) + run(runner, tiny.scheduled({"a": 1}))
    told += run(runner, tiny.scheduled({"a": 1}))
    assert [got, told] == want
    runner.step(tiny.scheduled({}, finished_req_ids={"kept", "a"}))


def test_a_grammar_that_lies_leaves_its_step_to_be_sampled(runner):
    mask, made = np.full((1, 2), -1, np.int32), cast(Any, GrammarOutput)
    runner.execute_model(first())
    with pytest.raises(RuntimeError, match="execute_model has begun a step: call sample_tokens"):
        runner.step(later())
    for grammar, message in [
        (3, "grammar_output must be a GrammarOutput, got 3"),
        (made("a", mask), r"grammar_output\.req_ids must be a tuple, got 'a'"),
        (made(("b",), mask), "must name requests of the step, each once, got 'b'"),
        (made((["a"],), mask), "must name requests of the step, each once"),
        (made(("a", "a"), mask), "must name requests of the step, each once, got 'a'"),
        (made(("a",), None), r"bitmask must be an int32 array, got None"),
        (made(("a",), mask.astype(np.int64)), "bitmask must be an int32 array"),
        (made(("a",), mask[:, :1]), r"bitmask must have one of the shapes \[\(1, 1, 2\)"),
        (made((), mask), r"bitmask must have one of the shapes .* got \(1, 2\)"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            runner.sample_tokens(grammar)
    assert runner.sample_tokens(GrammarOutput(("a",), mask)).get().req_ids == ("a",)
    runner.step(tiny.scheduled({}, finished_req_ids={"a"}))


def test_a_prefix_is_shared_and_a_block_has_one_writer():
    check = StepCheck(tiny.runner().program)
    check.take(first())
    reader = tiny.new_request("b", [*TRUE, 5], blocks=[10, 11, 13], computed=8)
    for request in (reader, replace(reader, request_id="c", block_ids=([10, 11, 14],))):
        check.take(tiny.scheduled({request.request_id: 1}, [request]))
    copied = replace(reader, request_id="d", num_computed=6, block_ids=([10, 15, 16],))
    check.take(tiny.scheduled({"d": 3}, [replace(copied, copies=((11, 15),))]))
    check.take(tiny.scheduled({}, finished_req_ids={"a", "c", "d"}))
    writer = tiny.new_request("e", TRUE, blocks=[11, 12])
    with pytest.raises(ValueError, match=r"block_ids\[0\]\[0\]=11 is a block that a request"):
        check.take(tiny.scheduled({"e": 8}, [writer]))
    check.take(tiny.scheduled({"e": 8}, [writer], finished_req_ids={"b"}))


def test_a_request_can_be_replaced_and_a_fork_goes_its_own_way():
    check = StepCheck(tiny.runner().program)
    check.take(first())
    check.take(first())  # the same id, with the same blocks
    other = check.copy()
    other.take(tiny.scheduled({}, finished_req_ids={"a"}))
    other.take(tiny.scheduled({"b": 8}, [new(request_id="b")]))
    with pytest.raises(ValueError, match="is a block that a request has already"):
        check.take(tiny.scheduled({"b": 8}, [new(request_id="b")]))


class Checked(Driver):
    """Has each step of a load checked."""

    def __init__(self, name: str):
        load = LOADS[name]
        super().__init__(load, seed=2, num_steps=500)
        engine = EngineConfig(
            max_model_len=load.max_model_len, num_blocks=load.num_blocks,
            block_size=load.groups[0].block_size, max_num_seqs=load.max_num_seqs,
            max_num_batched_tokens=load.budget, num_decode_steps=load.num_steps,
        )  # fmt: skip
        model = SimpleNamespace(vocab_size=40)
        groups = [replace(group, num_blocks=load.num_blocks) for group in load.groups]
        program: Any = SimpleNamespace(
            engine=engine, config=model, extra_args=[], cache_groups=groups, num_ranks=1,
            dims=dict(R=load.max_num_seqs),
        )  # fmt: skip
        self.steps = StepCheck(program)

    def schedule(self) -> bool:
        more = super().schedule()
        self.steps.take(self.queue[-1])
        return more


@pytest.mark.parametrize(
    "name",
    ["async tiny pool", "async priority", "tightest window", "window and full", "steps in windows",
     "steps, async, tiny pool"],
)  # fmt: skip
def test_no_step_of_our_scheduler_is_refused(name):
    driver = Checked(name)
    driver.run()
    assert driver.seen["hits"] and driver.seen["copies"] and driver.scheduler.num_preemptions
    assert not driver.steps._rows and not any(driver.steps._users)
