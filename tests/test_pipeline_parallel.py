"""Models in stages, on fake devices of a CPU: tokens are those of one device."""

from dataclasses import replace
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.device.program_spec import program_keys
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.heads.head import Head
from jaxrunner.models.llama import llama
from jaxrunner.parallel.pipeline import deal
from jaxrunner.programs.pipeline_programs import PipelinePrograms
from jaxrunner.programs.program_table import ProgramTable
from jaxrunner.runner.step_check import StepCheck
from jaxrunner.speculators.ngram import ngram
from jaxrunner.worker.worker import Worker
from tests.support import failing, small_checkpoint, tiny
from tests.support.crowd import QWEN, answers, engine, logprobs, requests

LLM_SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,),
    max_model_len=128, dtype="float32", warm_up=False, use_tqdm=False,
)  # fmt: skip
NGRAM = dict(method="ngram", num_speculative_tokens=2)
EAGLE3 = dict(method="eagle3", model=str(embedded.EAGLE3_PATH), num_speculative_tokens=2)


@pytest.fixture(scope="module")
def weights():
    config = tiny.config(**QWEN)
    return config, tiny.random_params(config, seed=5)


@pytest.fixture(scope="module")
def wanted(weights):
    """Returns what one device answers, without neighbours that would be in the way."""
    return answers(engine(weights), 1, alone=True)


@pytest.mark.devices(3)
def test_tokens_are_those_of_one_device(weights, wanted):
    e, aborted = engine(weights, 3), {3, 8, 9, 15, 20}
    got = answers(e, 1, aborted=aborted)
    runner, programs = e.runner, e.runner.programs
    assert isinstance(programs, PipelinePrograms)
    keys = program_keys(runner.program, runner.buckets, all_rules=True)
    for table in programs._tables:  # nothing is compiled but what warm-up compiles
        assert {one.key for one in table.ledger} <= set(programs._of(table, keys))
    assert e.scheduler.num_preemptions and any(r.num_cached_tokens for r in got)
    for one, want in zip(got, wanted, strict=True):
        tokens = one.output_token_ids
        cut = one.finish_reason == "abort"
        assert tokens == (want.output_token_ids[: len(tokens)] if cut else want.output_token_ids)
        if not cut:
            np.testing.assert_allclose(logprobs(one), logprobs(want), atol=2e-3)


@pytest.mark.slow
@pytest.mark.devices(3)
def test_drafts_of_the_last_stage_change_no_token(weights, wanted):
    e = engine(weights, 3, ngram(2, min_n=1, max_n=2))
    got = answers(e, 1)
    assert e.scheduler.num_preemptions
    assert sum(sum(r.draft_counts[2:]) for r in got) > 5
    for one, want in zip(got, wanted, strict=True):
        assert one.output_token_ids == want.output_token_ids
        np.testing.assert_allclose(logprobs(one), logprobs(want), atol=2e-3)


@pytest.mark.devices(3)
@pytest.mark.slow
def test_a_snapshot_in_the_midst_goes_on_in_any_number_of_stages(weights, wanted, tmp_path):
    e, asked = engine(weights, 3, max_num_seqs=2), requests(1)
    made = [e.add(f"{i}", *one, eos_token_ids=[60]) for i, one in enumerate(asked)]
    for _ in range(25):
        e.step()
    save_engine(e, tmp_path / "saved")
    unfinished = {r.request_id: len(r.output_token_ids) for r in made if not r.finish_reason}
    assert max(unfinished.values()) and e.scheduler.num_preemptions
    for num in (1, 3):
        other = engine(weights, num, max_num_seqs=6) if num != 3 else e  # the slots of all stages
        if other is not e:
            found = restore_engine(other, tmp_path / "saved").requests
            assert {name: len(r.output_token_ids) for name, r in found.items()} == unfinished
        else:
            found = {name: made[int(name)] for name in unfinished}
        while other.has_unfinished:
            other.step()
        for name, request in found.items():
            want = wanted[int(name)]
            assert request.output_token_ids == want.output_token_ids
            np.testing.assert_allclose(logprobs(request), logprobs(want), atol=2e-3)
    folder = tmp_path / "of one"
    save_engine(engine(weights, max_num_seqs=6), folder)
    restore_engine(e, folder)
    assert [r.output_token_ids for r in answers(e, 1)] == [r.output_token_ids for r in wanted]


@pytest.mark.devices(2)
def test_a_stage_begins_with_others_before_it_hears_of_a_token(weights, monkeypatch):
    log, find = [], ProgramTable.__getitem__

    def spied(table, key):
        program = find(table, key)

        def launch(*args):
            if key.name in ("stage", "receive"):
                slots = args[2][: key.size.num_rows] if key.name == "stage" else args[3]
                log.append((key.name, {int(slot) for slot in slots} - {10}))
            return program(*args)

        return launch

    monkeypatch.setattr(ProgramTable, "__getitem__", spied)
    e, params = engine(weights, 2), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    for name in "abcd":
        e.add(name, [3, 1, 4], params)
    while e.has_unfinished:
        e.step()
    stages = [slots for name, slots in log if name == "stage"]
    assert len(stages) >= 18 and all(len(slots) == 2 for slots in stages[:18])
    assert all(a.isdisjoint(b) for a, b in itertools.pairwise(stages[:18]))
    # Stage 0 has begun with the others before it writes down what the first two were given.
    order = ["stage", "stage", "receive", "stage", "receive", "stage"]
    assert [name for name, _ in log][:6] == order
    assert log[2][1] == log[3][1] == log[0][1] and log[4][1] == log[1][1]
    log.clear()
    e.add("e", [3, 1, 4], params)  # alone it does not wait for turns of nobody
    while e.has_unfinished:
        e.step()
    assert {name: [n for n, _ in log].count(name) for name in ("stage", "receive")} == dict(
        stage=9, receive=8
    )


@pytest.mark.devices(2)
def test_each_stage_has_a_step_of_max_num_seqs_requests(weights):
    e, params = engine(weights, 2, max_num_seqs=3), SamplingParams(max_tokens=6, ignore_eos=True)
    for name in "abcdefg":
        e.add(name, [3, 1, 4], params)
    e.launch()
    under_way = [set(scheduled.requests) for scheduled, _ in e._in_flight]
    assert under_way[:2] == [set("abc"), set("def")] and e.scheduler.num_waiting == 1
    while e.has_unfinished:
        e.step()
    check = StepCheck(engine(weights, 2, max_num_seqs=3).runner.program)
    new = [tiny.new_request(name, [1], blocks=[i]) for i, name in enumerate("abcd")]
    new = [replace(one, block_ids=one.block_ids * 2) for one in new]  # of two cache groups
    check.take(tiny.scheduled({}, new))
    with pytest.raises(ValueError, match="has 4 requests, max_num_seqs=3: schedule fewer in a st"):
        check.take(tiny.scheduled(dict.fromkeys("abcd", 1)))


@pytest.mark.devices(2)
@pytest.mark.parametrize("how", ["before the launch", "after the donation"])
def test_a_launch_in_its_thread_that_fails_ends_the_requests_of_its_step_alone(
    weights, monkeypatch, how
):
    e, params = engine(weights, 2), SamplingParams(max_tokens=6, temperature=0)
    want = [r.output_token_ids for r in run_all(e, params)]
    with monkeypatch.context() as patch:
        failed = failing.programs(patch, failing.nth(3, "step"), lambda: how)
        got = run_all(e, params)
    assert failed == ["step"]
    words = [str(r.error) for r in got if r.error]
    assert len(words) == 2 and all("RESOURCE_EXHAUSTED" in word for word in words)
    for request, tokens in zip(got, want, strict=True):
        assert request.error or request.output_token_ids == tokens
    assert [r.output_token_ids for r in run_all(e, params)] == want


def run_all(e, params):
    """Returns four requests that have ended, of which two are in a step."""
    made = [e.add(f"{i}", [7 * i + 1, 2, 3 + i], params) for i in range(4)]
    while e.has_unfinished:
        e.step()
    return made


@pytest.mark.devices(4)
@pytest.mark.slow
def test_an_llm_of_two_stages_on_two_devices_each(tmp_path):
    folder, tokens = small_checkpoint.save(tmp_path / "checkpoint"), small_checkpoint.tokens
    with small_checkpoint.start(folder) as llm:
        want, memory = tokens(llm), llm.memory_plan
    sizes: dict[str, Any] = dict(pipeline_parallel_size=2, speculative_config=NGRAM)
    with small_checkpoint.start(folder, tensor_parallel_size=2, **sizes) as llm:
        assert tokens(llm) == want
        assert llm.memory_plan.weights < 0.35 * memory.weights
        runner = llm.engine.runner
        held = [
            {device.id for device in jax.tree.leaves(kv)[0].devices()} for kv in runner.state.kv
        ]
        assert held == [{0, 1}, {2, 3}] and "stage 1: " in llm.report()
        llm.sleep(level=1)
        assert llm.params is None
        llm.wake_up()
        assert tokens(llm) == want
        llm.update_params(jax.tree.map(lambda x: np.asarray(x) * 0, llm.params))
        assert tokens(llm) != want
        llm.reload_weights()
        assert tokens(llm) == want
        llm.save_sharded_state(tmp_path / "shards")


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "sizes, words",
    [
        (dict(pipeline_parallel_size=9), r"=9 wants a layer a stage, .* has 8: lower it"),
        (
            dict(pipeline_parallel_size=4, tensor_parallel_size=4),
            r"=4 with tensor_parallel_size=4 needs 16 devices, there are \d+ \(.*\): lower one",
        ),
        (dict(pipeline_parallel_size=2, num_decode_steps=4), "with num_decode_steps=4: set it to"),
        (
            dict(pipeline_parallel_size=2, speculative_config=EAGLE3),
            "pipeline_parallel_size=2 does not go with drafts of layers, .*: take ngram or suffix",
        ),
        (
            dict(
                pipeline_parallel_size=2,
                speculative_config=NGRAM | dict(num_speculative_tokens="auto"),
            ),
            "=2 does not go with drafts of layers, of 'auto' numbers, or of some of the stages: t",
        ),
        (dict(pipeline_parallel_size=2, enforce_eager=True), "enforce_eager=True runs each op"),
        (dict(pipeline_parallel_size=0), "pipeline_parallel_size=0 is out of range"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_stages_is_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        LLM(str(embedded.PATH), **LLM_SIZES | sizes)


def test_models_and_ranks_that_cannot_be_are_refused():
    config = tiny.config()
    with pytest.raises(ValueError, match="rank=2 is none of pipeline_parallel_size=2: take 0 to 1"):
        deal(llama, config, 2, rank=2)
    part = Worker(
        str(embedded.PATH), pipeline_parallel_size=2, rank=1, speculative_config=NGRAM,
        devices=jax.devices()[:1],
    )  # fmt: skip
    part.init_device()
    with pytest.raises(ValueError, match=r"drafts of .*, or of some of the stages: t"):
        part.load_model()
    head = Head("mean", "B", lambda *_: jax.numpy.zeros(1))
    with pytest.raises(
        ValueError, match=r"=2 wants a model of layers alone, Llama.* reads slot ta"
    ):
        deal(llama._replace(heads=(head,)), config, 2)
