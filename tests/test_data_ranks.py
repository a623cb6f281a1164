"""Experts over data ranks, on fake devices of a CPU: tokens are those of one device."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.device.buckets import choose
from jaxrunner.program.bucket import Bucket
from jaxrunner.speculators.ngram import ngram
from jaxrunner.worker.expert_balance import placement_of
from tests.support import failing, small_checkpoint
from tests.support.crowd import answers, logprobs
from tests.support.data_ranks import GREEDY, MIXTURE, RANKS, SIZES, D, engine

# Of these an engine alone and an `LLM` have the same programs, which are compiled once.
PROGRAMS = (
    "max_num_seqs", "max_num_batched_tokens", "token_buckets", "decode_buckets", "max_model_len",
    "num_blocks", "block_size", "dtype",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return small_checkpoint.save_family(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def wanted(folder) -> list[Any]:
    """Returns what one device answers, without neighbours that would be in the way."""
    return answers(engine(folder), 1)


@pytest.mark.slow
@pytest.mark.devices(2 * D)
@pytest.mark.parametrize(
    ("tensor", "speculator"),
    [(2, None), (1, ngram(2, min_n=1, max_n=2))],
    ids=["two devices a rank", "drafts, one device a rank"],
)
def test_tokens_are_those_of_one_device(tensor, speculator, folder, wanted):
    """Of requests that use every feature of sampling, crowd each other, and some of which end."""
    e = engine(folder, tensor, speculator, num_blocks=14)
    got = answers(e, 1, aborted={3, 8, 15})
    assert e.scheduler.num_preemptions and any(r.num_cached_tokens for r in got)
    if speculator is not None:
        assert sum(sum(r.draft_counts[2:]) for r in got) > 5
    for one, want in zip(got, wanted, strict=True):
        cut, tokens = one.finish_reason == "abort", one.output_token_ids
        assert tokens == (want.output_token_ids[: len(tokens)] if cut else want.output_token_ids)
        if not cut:
            np.testing.assert_allclose(logprobs(one), logprobs(want), atol=2e-3)
    experts = e.runner.params.layers[1].experts.down
    assert {x.data.shape[0] for x in experts.addressable_shards} == {6 // (D * tensor)}


@pytest.mark.slow
@pytest.mark.devices(D)
def test_a_step_that_fails_ends_its_requests_and_others_go_on(folder, monkeypatch):
    sizes = {name: SIZES[name] for name in PROGRAMS}
    e, prompts = engine(folder, 1, **sizes), [[n, n + 1, 7] for n in range(4)]
    for i, prompt in enumerate(prompts):
        e.add(f"{i}", prompt, GREEDY)
    with monkeypatch.context() as context:
        failing.programs(context, lambda key: key.name == "step", lambda: "after the donation")
        failed = [request for request, _ in e.step()]
    assert {r.finish_reason for r in failed} == {"error"} and len(failed) == 4
    requests = [e.add(f"{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    while e.has_unfinished:
        e.step()
    one = engine(folder, **sizes)
    wanted = [one.add(f"{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    while one.has_unfinished:
        one.step()
    assert [r.output_token_ids for r in requests] == [r.output_token_ids for r in wanted]


@pytest.mark.devices(D)
def test_an_llm_over_ranks_is_an_llm(folder, tmp_path):
    """One request alone, more than have slots, and what is done with the weights."""
    prompts = [dict(prompt_token_ids=[n, *range(9), 5]) for n in range(3 * D)]

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, GREEDY, on_error="raise")
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(folder, **SIZES) as one:
        want, alone = tokens(one), one.generate(prompts[0], GREEDY)[0].outputs[0].token_ids
        with LLM(folder, **SIZES | RANKS) as llm:
            assert llm.generate(prompts[0], GREEDY)[0].outputs[0].token_ids == alone
            devices = f"devices: 3 x {jax.devices()[0].device_kind}, data 3, te"
            assert tokens(llm) == want and llm.report().startswith(devices)
            assert len(llm.runner.programs.ready()) == 3  # a prefill's, a decode's, an admission's
            llm.save_params(tmp_path / "params")
            llm.sleep(level=2)
            llm.wake_up()
            llm.reload_weights()
            assert tokens(llm) == want
        one.load_params(tmp_path / "params")
        assert tokens(one) == want


@pytest.mark.slow
@pytest.mark.devices(2 * D)
def test_experts_are_balanced_over_all_ranks(folder):
    prompts = [dict(prompt_token_ids=[n, *range(9), 5]) for n in range(3 * D)]
    eplb = dict(num_redundant_experts=6, window_size=2, step_interval=3)
    several: dict[str, Any] = RANKS | dict(
        tensor_parallel_size=2, enable_eplb=True, eplb_config=eplb
    )
    with LLM(folder, **SIZES) as one, LLM(folder, **SIZES | several) as llm:
        want, got = (each.generate(prompts, GREEDY, on_error="raise") for each in (one, llm))
        assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in want]
        balance, computed = llm.engine.balance, 3 * D * (11 + 5)
        assert balance.num_moves > 1 and (placement_of(llm.runner).expert[:, :6] != range(6)).any()
        cached = sum(output.num_cached_tokens for output in got)
        assert (balance.loads().sum(1) == 2 * (computed - cached)).all()


@pytest.mark.devices(D)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(data_parallel_size=4), "has 4 devices, which do not divide num_experts=6: change"),
        (dict(enable_eplb=True, eplb_config=dict(num_redundant_experts=1)), "size=3 does not di"),
        pytest.param(
            dict(pipeline_parallel_size=2),
            "pipeline_parallel_size does not go with data_parallel",
            marks=pytest.mark.devices(2 * D),
        ),
    ],
)
def test_what_does_not_go_with_ranks_is_refused(changes, words, folder):
    with pytest.raises(ValueError, match=words):
        LLM(folder, **SIZES | RANKS | changes)


def test_a_size_holds_the_rows_of_each_rank():
    buckets = Bucket(2, 2, 1), Bucket(4, 2), Bucket(8, 8, 1), Bucket(16, 8)
    assert choose(buckets, [1, 1], others=[[], [1]]) == buckets[0]
    assert choose(buckets, [1], others=[[3], []]) == buckets[1]
    assert choose(buckets, [], others=[[1] * 5, [1]]) == buckets[2]
    assert choose(buckets, [1] * 5, others=[[3]]) == buckets[3]  # neither of those before
