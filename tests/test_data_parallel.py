"""Engines side by side behind one `LLM`: tokens are those of one, and none waits for another."""

from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, BeamSearchParams, SamplingParams
from jaxrunner.api.sampling_params import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.replicas import engines_of
from jaxrunner.loading.weights import load_params
from jaxrunner.models.llama import llama
from jaxrunner.runner.step_handle import StepHandle
from jaxrunner.worker.worker import Worker
from tests.support import tiny
from tests.support.replicas import GREEDY, MODEL, SIZES, TWO, folder, ids, open_llm

__all__ = ["folder"]  # a fixture
pytestmark = pytest.mark.devices(4)
NGRAM = dict(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
REGEX = StructuredOutputsParams(regex="(A|B)[C-F]{3,9}") if find_spec("llguidance") else None
KINDS = [
    SamplingParams(max_tokens=14),  # whose seed is drawn
    SamplingParams(temperature=0.8, max_tokens=9, n=2, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(
        temperature=0.9, max_tokens=7, logprobs=3, prompt_logprobs=1, repetition_penalty=1.2,
        presence_penalty=0.3, logit_bias={5: 1.0}, min_tokens=3, stop_token_ids=[7],
    ),
    SamplingParams(temperature=0.7, max_tokens=12, structured_outputs=REGEX),
    SamplingParams(temperature=0, max_tokens=20, bad_words=["A"], allowed_token_ids=[*range(40)]),
]  # fmt: skip
PROMPTS = [np.random.default_rng(i).integers(0, 60, 3 + 5 * (i % 4)).tolist() for i in range(12)]
ASKED = [KINDS[i % len(KINDS)] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def one(folder):
    with open_llm(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(folder):
    """Returns two engines that draft, on two devices each."""
    with open_llm(folder, **TWO, tensor_parallel_size=2, speculative_config=NGRAM) as llm:
        yield llm


def answers(llm: LLM) -> list[Any]:
    """Returns what an LLM answers that has drawn no seed."""
    seeds = np.random.default_rng(0)
    for engine in engines_of(llm.engine):
        engine._seeds = seeds
    outputs = llm.generate(ids(PROMPTS), ASKED, on_error="raise", use_tqdm=False)
    return [(o.error, [c.token_ids for c in o.outputs]) for o in outputs]


@pytest.fixture(scope="module")
def want(one):
    """Returns what one engine answers."""
    return answers(one)


def used(llm: LLM) -> list[int]:
    """Returns the steps of each engine."""
    return [sum(sum(c.values()) for c in e.runner.traffic.values()) for e in llm.engine.engines]


def test_tokens_are_those_of_one_engine(two, want):
    assert answers(two) == want
    assert min(used(two)) > 0 and two.engine.router.work == [0, 0]
    places = [
        {d.id for x in jax.tree.leaves((r.params, r.state)) for d in x.devices()}
        for r in two.engine.worker.runners
    ]
    assert places == [{0, 1}, {2, 3}]
    told = {m.labels["engine"] for m in two.get_metrics()}
    assert told == {"0", "1"} and "replica 1 on cpu" in two.report()
    assert sum(engine.scheduler.num_preemptions for engine in two.engine.engines) > 0


def test_whatever_an_llm_is_asked(one, two):
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    for llm in (one, two):
        llm.reset_prefix_cache()
    for name, args in (
        ("beam_search", (ids(PROMPTS[:2]), params)),
        ("loglikelihood", ([(PROMPTS[1], PROMPTS[2]), (PROMPTS[3], PROMPTS[0])],)),
        ("score_tokens", (ids(PROMPTS[:3]),)),
    ):
        ours, theirs = (getattr(llm, name)(*args, use_tqdm=False) for llm in (two, one))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            if hasattr(a, "sequences"):
                assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
            else:
                np.testing.assert_allclose(a, b, atol=1e-5)
    streamed: dict[str, list[int]] = {}
    for output in two.stream(ids(PROMPTS[:3]), GREEDY):
        streamed.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
    outputs = one.generate(ids(PROMPTS[:3]), GREEDY, use_tqdm=False)
    assert [*streamed.values()] == [o.outputs[0].token_ids for o in outputs]


def test_nothing_of_a_replica_lies_elsewhere(folder):
    """Neither at rest, nor for a step that would copy it."""
    here = jax.devices()[3]
    before = {id(x) for x in jax.live_arrays()}
    worker = Worker(folder, devices=[here], **_without("generation_config", "use_tqdm", "warm_up"))
    worker.read_checkpoint(tokenizer=None)
    worker.start(warm_up=None)
    engine = Engine.of(worker)
    for i, kind in enumerate([KINDS[0], KINDS[2], GREEDY]):
        engine.add(str(i), PROMPTS[i], kind)
    with jax.transfer_guard_device_to_device("disallow"):
        while engine.has_unfinished:
            engine.step()
    new = [x for x in jax.live_arrays() if id(x) not in before and not x.is_deleted()]
    assert new and {d for x in new for d in x.devices()} == {here}
    worker.check_health()
    engine.close()


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names}


def test_a_prefix_is_computed_once_and_completions_stay_together(two):
    assert two.reset_prefix_cache()
    prompts = [[i, *range(20, 36)] for i in range(4)]  # apart
    two.generate(ids(prompts), GREEDY, use_tqdm=False)
    outputs = two.generate(ids([[*prompt, 50] for prompt in prompts[::-1]]), GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs] == [16] * 4
    group: list[Any] = []
    params = SamplingParams(n=3, max_tokens=3)
    parsed = {"prompt_token_ids": [40, 41, 42, 43, 44]}
    for output in two.stream(parsed, params):
        group = group or [set(e.unfinished) for e in two.engine.engines]
        assert len(output.outputs) == 1
    assert sorted(map(len, group)) == [0, 3] or sorted(map(len, group)) == [0, 2]


def test_no_engine_waits_for_the_step_of_another(two, monkeypatch):
    slow = {"slow"}
    ready = property(lambda self: slow.isdisjoint(self.req_ids))  # then `read` waits
    monkeypatch.setattr(StepHandle, "is_ready", ready)
    engine = two.engine
    requests = [engine.add(name, [n] * 9, GREEDY) for n, name in enumerate(("slow", "fast"))]
    with pytest.raises(ValueError, match="request 'fast' is unfinished"):
        engine.add("fast", [1], GREEDY)
    while requests[1].finish_reason is None:
        engine.step()
    assert requests[0].output_token_ids == [] and len(requests[1].output_token_ids) == 6
    slow.clear()
    while engine.has_unfinished:
        engine.step()
    assert len(requests[0].output_token_ids) == 6


def test_a_replica_without_work_launches_nothing(two, monkeypatch):
    # Ranks that one program couples would agree on a size; these have programs of their own.
    engine, launched = two.engine, [list[int](), list[int]()]
    for each, sizes in zip(engine.engines, launched, strict=True):
        monkeypatch.setattr(each.runner, "step", noting(each.runner.step, sizes))
    assert engine.step() == [] and launched == [[], []]  # nobody has work: nobody runs
    engine.add("alone", [1, 2, 3], GREEDY)
    while engine.has_unfinished:
        engine.step()
    idle, busy = sorted(launched, key=len)
    assert idle == [] and busy[0] == 3 and len(busy) >= 2


def noting(step: Any, sizes: list[int]) -> Any:
    """Returns a runner's `step`, which adds the tokens of each launch."""

    def noted(output: Any) -> StepHandle:
        handle = step(output)
        if handle.req_ids:
            sizes.append(output.total_num_scheduled_tokens)
        return handle

    return noted


def test_an_abort_ends_requests_wherever_they_are(two):
    parts = two.stream(ids(PROMPTS[:4]), SamplingParams(max_tokens=30))
    next(parts)
    with pytest.raises(RuntimeError, match="requests are at work: finish or abort them, then sl"):
        two.sleep()
    for name in [*two.completions._states]:
        two.abort(name)
    assert {o.outputs[0].finish_reason for o in parts if o.finished} == {"abort"}
    assert not two.engine.has_unfinished and two.engine.router.work == [0, 0]


def test_weights_change_on_all_devices(folder, one, two, want):
    config, old = tiny.config(**MODEL), jax.device_get(two.params)
    new = load_params(folder / "other", llama, config, dtype="float32", progress=False)
    one.update_params(new)
    wanted = answers(one)
    for how in ("arrays", "files", "sleep"):
        if how == "arrays":
            two.update_params(jax.device_get(new))
        elif how == "files":
            two.reload_weights()
            two.start_weight_update()
            two.update_weights({"model.norm.weight": np.asarray(new.norm)})
            two.finish_weight_update()
            two.reload_weights(folder / "other")
        else:
            two.sleep(level=1)
            assert all(r.params is None is r.state for r in two.engine.worker.runners)
            with pytest.raises(RuntimeError, match="sleep: call wake_up"):
                two.engine.add("x", [1], GREEDY)
            two.wake_up()
        first, second = two.apply_model(jax.device_get)
        jax.tree.map(np.testing.assert_array_equal, first, second)
        assert answers(two) == wanted != want
    assert two.weights_version == 4 and {e.weights_version for e in two.engine.engines} == {4}
    for llm in (one, two):
        llm.update_params(old)
    two.check_health()


@pytest.mark.parametrize("grows", [False, True], ids=["in this process", "in a new one"])
def test_a_snapshot_of_all_goes_on(folder, one, two, tmp_path, grows):
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=3, n=2)
    (output,) = one.generate(ids(PROMPTS[1:2]), params, use_tqdm=False)
    wanted = [c.token_ids for c in output.outputs]
    parts = two.stream(ids(PROMPTS[:4]), params)
    next(parts)
    two.save_state(tmp_path / "state")
    parts.close()
    if grows:
        with pytest.raises(ValueError, match=r"state must hold 3 replicas, it has 2: restore with"):
            with open_llm(folder, data_parallel_size=3, num_blocks=40) as llm:
                llm.restore_state(tmp_path / "state")
        return
    assert not two.engine.has_unfinished
    got: dict[tuple[str, int], list[int]] = {}
    for part in two.restore_state(tmp_path / "state"):
        for told in part.outputs:
            got.setdefault((part.request_id, told.index), []).extend(told.token_ids)
    assert len(got) == 8 and two.engine.router.work == [0, 0]
    name = sorted({name for name, _ in got}, key=int)[1]
    assert [got[name, i] for i in range(2)] == wanted
    (tmp_path / "state" / "replica1" / "host.json").write_text("{}")
    with pytest.raises(ValueError, match=r"host\.json"):
        two.restore_state(tmp_path / "state")
    assert not two.engine.has_unfinished
