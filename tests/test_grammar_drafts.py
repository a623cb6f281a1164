"""Drafts of requests with a grammar: they stand where the grammar allows, and change no token."""

from collections.abc import Callable
from dataclasses import replace
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, step
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.indexing import take
from jaxrunner.model import Model
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from jaxrunner.speculators.speculator import DraftInputs, Proposal, Speculator
from jaxrunner.types import Array
from tests.support import features, rules, tiny
from tests.support.drafters import PROMPTS, K, with_itself
from tests.support.small_llm import SIZES

GRAMMARS = {
    "json": dict(json={"type": "object", "properties": {
        "name": {"type": "string", "maxLength": 8}, "tags": {"type": "array", "maxItems": 3,
        "items": {"enum": ["a", "b"]}}}, "required": ["name", "tags"],
        "additionalProperties": False}, disable_any_whitespace=True),
    "regex": dict(regex=r"self\.[a-c]{3} = self\.\d{2}"),
    "choice": dict(choice=["return self.value", "raise ValueError(value)", "pass"]),
}  # fmt: skip
NGRAM: dict[str, Any] = dict(
    method="ngram", prompt_lookup_min=1, prompt_lookup_max=3, num_speculative_tokens=3
)
PROMPT = "    def set(self, value):\n        self.abc = self.10\n        "


def asked() -> list[SamplingParams]:
    """Returns what each of some requests asks for: every third has no grammar."""
    found = []
    for i, kind in enumerate(GRAMMARS):
        free = SamplingParams(temperature=0.8, seed=i, max_tokens=24)
        ruled = replace(free, structured_outputs=StructuredOutputsParams(**GRAMMARS[kind]))
        found += [replace(ruled, temperature=0.0), replace(ruled, ignore_eos=True, seed=9), free]
    return found


def answers(folder: str, **changes: Any):
    """Returns what a model answers, and steps and accepted drafts of each request."""
    with LLM(folder, **SIZES | dict(max_num_seqs=4, decode_buckets=(4,)), **changes) as llm:
        outputs = llm.generate([PROMPT] * len(asked()), asked(), use_tqdm=False)
    told = [(o.outputs[0].token_ids, o.outputs[0].finish_reason, o.error) for o in outputs]
    return told, [o.metrics.num_accepted_tokens_per_pos for o in outputs if o.metrics]


@pytest.mark.slow
def test_grammars_of_text_give_the_same_tokens_with_drafts(shallow):
    pytest.importorskip("llguidance")
    plain, _ = answers(shallow, async_depth=1)
    assert {reason for _, reason, _ in plain} == {"stop", "length"}
    told, accepted = answers(shallow, speculative_config=NGRAM, async_depth=1)
    assert told == plain
    ruled = [
        counts for counts, one in zip(accepted, asked(), strict=True) if one.structured_outputs
    ]
    assert min(np.sum(ruled, axis=0)) > 0


EOS = (features.EOS,)
# Preempted requests with grammars and drafts are in the loads of `test_drafts_driver.py`.
ENGINES = {
    "steps ahead": dict(async_depth=2),
    "several steps a launch": dict(async_depth=2, num_decode_steps=4),
}


def engine(model: Model, config: Any, params: Any, **changes: Any) -> Engine:
    sizes = tiny.engine_config(**changes)
    return Engine(model, config, sizes, params, make_compiler=features.ParityCompiler)


def verified(rejection: str, rates: tuple[float, ...] = ()):
    """Returns the tiny model drafted by itself, which knows no grammar, and verified so."""
    model, config, params = with_itself()
    assert model.speculator is not None
    speculator = model.speculator._replace(rejection=rejection, rates=rates)
    return model._replace(speculator=speculator), config, params


def scripted(token_of: Callable[[Array], Array]):
    """Returns the tiny model with drafts that follow from an output token's place alone."""

    def propose(inputs: DraftInputs) -> Proposal:
        first = take(inputs.requests.total_len - inputs.requests.prompt_len, inputs.rows.slot)
        return Proposal(token_of(first[:, None] + jnp.arange(K)[None]).astype(jnp.int32))

    speculator = Speculator("scripted", K, propose)
    return llama._replace(speculator=speculator), *tiny.model_and_params()


def add(e: Engine, **changes: Any) -> list[Request]:
    """Adds requests, the last without a grammar."""
    ruled = SamplingParams(max_tokens=20, structured_outputs=features.GRAMMAR, **changes)
    params = [replace(ruled, seed=i, ignore_eos=i % 2 == 1) for i in range(4)]
    params.append(replace(ruled, structured_outputs=None, seed=4))
    given = zip(PROMPTS.items(), params, strict=True)
    return [e.add(name, ids, one, eos_token_ids=EOS) for (name, ids), one in given]


def ends(requests: list[Request]) -> list[Any]:
    return [(r.output_token_ids, r.finish_reason, r.stop_reason, r.error) for r in requests]


def finish(e: Engine, requests: list[Request]) -> list[Any]:
    while e.has_unfinished:
        e.step()
    return ends(requests)


@functools.cache
def plain(temperature: float) -> list[Any]:
    return without_drafts(temperature=temperature)


def without_drafts(**changes: Any) -> list[Any]:
    e = engine(llama, *tiny.model_and_params())
    return finish(e, add(e, **changes))


def num_accepted(requests: list[Request]) -> np.ndarray:
    return np.sum([r.draft_counts[2:] for r in requests if r.draft_counts], axis=0)


@pytest.mark.parametrize("changes", ENGINES.values(), ids=ENGINES.keys())
def test_drafts_change_no_token_of_a_request_with_a_grammar(changes):
    e = engine(*with_itself(), **changes)
    for temperature in (0.0, 1.0):
        requests = add(e, temperature=temperature)
        assert finish(e, requests) == plain(temperature)
        assert (num_accepted(requests[:4]) > 0).all()


def test_nothing_comes_behind_the_end_of_a_grammar():
    """There a mask has EOS alone, so that a draft of one more would stand."""
    rule: dict[str, Any] = dict(temperature=0.0, min_tokens=4, logit_bias={features.EOS: 99.0})
    e = engine(*scripted(lambda place: jnp.full_like(place, features.EOS)))
    requests = add(e, **rule)
    assert finish(e, requests) == without_drafts(**rule)
    for request in requests[:4]:
        assert (len(request.output_token_ids), request.finish_reason) == (5, "stop")
        assert request.draft_counts[-1] == 1  # all K stood, the first of them counts


def test_tokens_before_one_that_no_rule_leaves_are_given():
    rule: dict[str, Any] = dict(allowed_token_ids=[2, 3], bad_words=[[2, 3, 2, 3]], max_tokens=9)
    asked = SamplingParams(temperature=0.0, structured_outputs=features.GRAMMAR, **rule)
    found = []
    for given in (scripted(lambda place: 2 + place % 2), (llama, *tiny.model_and_params())):
        e = engine(*given)
        request = e.add("a", [5, 1], asked, eos_token_ids=EOS)
        found += finish(e, [request])
    assert found[0] == found[1]
    tokens, reason, _, error = found[0]
    assert (tokens, reason) == ([2, 3, 2], "error")
    assert error.startswith("its rules leave no token to sample: allowed_token_ids")


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=["NaN", "infinity"])
@pytest.mark.parametrize("j", range(3))
def test_a_step_ends_before_a_token_that_means_nothing(j, value):
    """The next one says whether that fails: it may lie behind a draft that is wrong."""
    greedy = SamplingParams(temperature=0)
    rows = [rules.Row(greedy, drafts=drafts) for drafts in ([1, 2], [1, 2], [1], [], [1, 9])]
    logits = np.zeros((5, 3, features.V), np.float32)
    logits[:, range(3), [1, 2, 3]] = 1
    logits[1:, j, 7] = value
    state, due = rules.state_of(rows, size=5)
    _, got = step.finish(
        state, due, rules.step_draw(rows, logits, size=5), {}, program=rules.program()
    )
    # What is scored past a request's last draft belongs to the next one, or to padding.
    assert got.num_sampled.tolist() == [3, max(j, 1), 1 + (j > 1), 1, max(j, 1)]
    assert got.not_finite.tolist() == [False] + [j == 0] * 4 and not got.no_choice.any()


@pytest.mark.parametrize(
    "verification",
    [
        pytest.param(("block",), id="block"),
        pytest.param(("synthetic", (1.0, 1.0, 1.0)), id="synthetic"),
    ],
)
def test_a_grammar_holds_however_drafts_are_verified(verification):
    e = engine(*verified(*verification))
    requests = add(e, temperature=1.0)
    for tokens, reason, _, error in finish(e, requests)[:4]:
        said = [token for token in tokens if token != features.EOS]
        assert [token % 2 for token in said] == [i % 2 for i in range(len(said))] and said
        assert (reason, error) in (("stop", None), ("length", None))
    assert num_accepted(requests[:4])[0] > 0
    if verification[0] != "synthetic":
        assert finish(e, add(e, temperature=0.0)) == plain(0.0)


def test_drafts_proposed_before_a_snapshot_are_verified_after_it(tmp_path):
    e, other = (engine(*with_itself(), async_depth=2) for _ in range(2))
    add(e, temperature=0.0)
    for _ in range(3):
        e.step()
    save_engine(e, tmp_path / "saved")
    requests, _ = restore_engine(other, tmp_path / "saved")
    planned = other.scheduler.requests["a"]
    assert planned.num_drafts == len(planned.draft_token_ids) == K
    want = plain(0.0)
    got = finish(other, list(requests.values()))
    assert got == [want["abcde".index(name)] for name in requests] and "a" in requests


def test_a_grammar_that_fails_at_drafts_ends_its_request_alone(monkeypatch):
    def fails(self: features.Parity, rows: np.ndarray, drafts: list[int]) -> None:
        if drafts and len(self.tokens) > 3:
            raise RuntimeError("of its own")
        real(self, rows, drafts)

    want, real = plain(0.0), features.Parity.fill_drafts
    monkeypatch.setattr(features.Parity, "fill_drafts", fails)
    e = engine(*with_itself())
    *ruled, free = finish(e, add(e, temperature=0.0))
    for got, expected in zip(ruled, want, strict=False):
        if len(expected[0]) > 5:
            assert got[3] == "structured_outputs: the grammar failed: RuntimeError: of its own"
            assert got[0] == expected[0][: len(got[0])] and got[1] == "error"
    assert free == want[4] and any(got[3] for got in ruled)
