"""Routes of a mixture, told with its outputs and replayed in scores."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.loading.loader import load
from jaxrunner.ops.backends import dense
from jaxrunner.ops.routing import with_routes
from jaxrunner.types import Inputs
from jaxrunner.worker.worker import Worker

pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the reference needs transformers")

Y, X, k = 2, 6, 2  # of the tiny mixture: layers, experts, those of a token
PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in (1, 5, 17, 40, 90)]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=8, max_model_len=128, block_size=8, num_blocks=200,
    token_buckets=(64,), decode_buckets=(8,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None, use_tqdm=False, enable_return_routed_experts=True,
)  # fmt: skip
RANK: dict[str, Any] = dict(pipeline_parallel_size=2, rank=0)
OFF: dict[str, Any] = dict(enable_return_routed_experts=False)
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Returns a folder of a tiny mixture whose second layer may be dense, and its model."""
    from tests.support import mixtures

    @functools.cache
    def save(variant):
        model, folder = mixtures.model(variant), tmp_path_factory.mktemp("mixture")
        model.save_pretrained(folder)
        return model, str(folder)

    return save


@pytest.fixture(scope="module")
def llm(mixture):
    with LLM(mixture("qwen3")[1], **SIZES) as made:
        yield made


def ask(llm, prompts, params: Any = GREEDY):
    return llm.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)


def expected(model, ids):
    """Returns the experts that transformers' routers choose, sorted, [tokens, layers, k]."""
    import torch

    with torch.no_grad():
        told = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return np.stack([np.sort(x.float().topk(k, -1).indices.numpy(), -1) for x in told], 1)


def check(model, prompts, outputs, layers=slice(None)):
    """Checks the routes of whole outputs against transformers."""
    for prompt, output in zip(prompts, outputs, strict=True):
        (told,) = output.outputs
        ids = prompt + list(told.token_ids)
        assert told.routed_experts.dtype == np.int16
        assert told.routed_experts.shape == (len(ids) - 1, Y, k)
        found = np.sort(told.routed_experts[:, layers], -1)
        np.testing.assert_array_equal(found, expected(model, ids[:-1]))


def test_routes_are_those_of_transformers(mixture, llm):
    """Prompts in chunks and together; then from cached prefixes, some of them longer."""
    model = mixture("qwen3")[0]
    check(model, PROMPTS, ask(llm, PROMPTS))
    longer = [[*prompt, 7, 8, 9] for prompt in PROMPTS]
    again = ask(llm, longer)
    assert again[-1].num_cached_tokens >= 80
    check(model, longer, again)


VARIANTS: dict[str, dict[str, Any]] = {
    "preempted": dict(num_blocks=16),
    "several steps a launch": dict(num_decode_steps=4),
    "drafts": dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)),
    "stages of two devices": dict(
        pipeline_parallel_size=2, tensor_parallel_size=2, enable_expert_parallel=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["preempted", *(pytest.param(name, marks=pytest.mark.devices(4)) for name in [*VARIANTS][1:])],
)
def test_routes_depend_on_the_request_alone(name, mixture, llm):
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (30, 9, 30, 25)]
    want = ask(llm, PROMPTS[:4], params)
    with LLM(mixture("qwen3")[1], **SIZES | VARIANTS[name]) as other:
        got = ask(other, PROMPTS[:4], params)
        assert name != "preempted" or other.engine.scheduler.num_preemptions
        (again,), (own,) = (replayed(each) for each in (other, llm))
        np.testing.assert_allclose(again.logprobs, own.logprobs, atol=1e-4)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a.outputs[0].routed_experts, b.outputs[0].routed_experts)


def replayed(llm):
    """Returns the scores of tokens whose routes are given."""
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(X), (17, Y, 1)), axis=-1)[..., :k]
    prompt = dict(prompt_token_ids=PROMPTS[2])
    return llm.score_tokens(prompt, routed_experts=[routes], use_tqdm=False)


@pytest.mark.slow
@pytest.mark.devices(2)
def test_routes_are_whole_where_tokens_are_dealt_out(mixture):
    folder = mixture("deepseek v3")[1]
    several: dict[str, Any] = dict(tensor_parallel_size=2, decode_context_parallel_size=2)
    with LLM(folder, **SIZES) as one, LLM(folder, **SIZES | several) as other:
        for a, b in zip(ask(one, PROMPTS), ask(other, PROMPTS), strict=True):
            np.testing.assert_array_equal(a.outputs[0].routed_experts, b.outputs[0].routed_experts)
        (a,), (b,) = (replayed(llm) for llm in (one, other))
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


@pytest.mark.slow
def test_layers_without_experts_have_none(mixture):
    """Beside windows, whose blocks are given back before a request ends."""
    model, folder = mixture("qwen3, dense layers, windows")
    with LLM(folder, **SIZES) as made:
        outputs = ask(made, PROMPTS[1:4])
    check(model, PROMPTS[1:4], outputs, layers=slice(1))
    routes: list[Any] = [out.outputs[0].routed_experts for out in outputs]
    assert all((told[:, 1] == -1).all() for told in routes)


def test_a_stream_tells_routes_at_its_end(llm):
    prompts = [dict(prompt_token_ids=p) for p in PROMPTS[1:3]]
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True, detokenize=False)
    for out in llm.stream(prompts, params):
        told = out.outputs[0]
        assert (told.routed_experts is not None) == (told.finish_reason is not None)
        if told.routed_experts is not None:
            assert len(told.routed_experts) == len(out.prompt_token_ids) + 5


@pytest.mark.slow
def test_a_snapshot_has_routes(llm, tmp_path):
    """Of what is at work; a request of half its tokens goes on and tells all of them."""
    (want,) = ask(llm, PROMPTS[3:4])
    stream = llm.stream([dict(prompt_token_ids=PROMPTS[3])], GREEDY)
    next(stream)
    llm.save_state(tmp_path / "half")
    stream.close()
    *_, last = llm.restore_state(tmp_path / "half")
    np.testing.assert_array_equal(last.outputs[0].routed_experts, want.outputs[0].routed_experts)


def scores_by_a_trainer(folder, ids, routes):
    """Returns the logprobs of tokens by the operations of a trainer that replays routes."""
    loaded = load(folder)
    params = with_routes(loaded.read_params(progress=False), jnp.asarray(routes))
    n = len(ids)
    inputs = Inputs(jnp.asarray(ids), jnp.arange(n), jnp.full(n, n))
    x = loaded.model.embed(loaded.config, params, inputs)
    run, none = loaded.model.layers, (None,) * Y
    hidden, _, _ = run(loaded.config, params, x, none, inputs, dense(1))
    logits = loaded.model.logits(loaded.config, params, hidden)
    rows = jax.nn.log_softmax(logits.astype(jnp.float32), -1)
    return np.asarray(rows)[np.arange(n - 1), ids[1:]]


def test_scores_replay_given_routes(mixture, llm):
    """Among requests without, in chunks; whoever comes next shares no key of theirs."""
    prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS[2:]]
    own = llm.score_tokens(prompts, use_tqdm=False)
    rng = np.random.default_rng(0)
    given = [np.stack([rng.permutation(X)[:k] for _ in range(len(ids) * Y)]) for ids in PROMPTS[2:]]
    routes = [a.reshape(-1, Y, k) for a in given]
    told = llm.score_tokens(prompts, routed_experts=[*routes[:2], None], use_tqdm=False)
    want = scores_by_a_trainer(mixture("qwen3")[1], PROMPTS[3], routes[1])
    np.testing.assert_allclose(told[1].logprobs, want, atol=1e-4)
    assert np.abs(told[1].logprobs - own[1].logprobs).max() > 0.1
    np.testing.assert_array_equal(told[2].logprobs, own[2].logprobs)
    same = llm.score_tokens(prompts, use_tqdm=False)
    np.testing.assert_array_equal(same[1].logprobs, own[1].logprobs)
    replayed = [out.outputs[0].routed_experts for out in ask(llm, PROMPTS[2:])]
    cut = [a[: len(ids) - 1] for a, ids in zip(replayed, PROMPTS[2:], strict=True)]
    again = llm.score_tokens(prompts, routed_experts=cut, use_tqdm=False)
    for a, b in zip(own, again, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


GOOD = np.tile(np.arange(k, dtype=np.int16), (5, Y, 1))


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([[1, 2]], r"routed_experts must be an array of integers, got"),
        (GOOD[:3], r"must be \[tokens, layers, k\]=\[5, 2, 2\], or without .*got \[3, 2, 2\]"),
        (GOOD * 6, r"routed_experts must be from 0 to 5, got 0 to 6"),
        (GOOD * 0, r"routed_experts must be k different ones of each token"),
    ],
)
def test_routes_that_cannot_be_are_refused(llm, routes, words):
    with pytest.raises((TypeError, ValueError), match=words):
        llm.score_tokens(dict(prompt_token_ids=[1] * 5), routed_experts=[routes])
    words = "routed_experts must be an array for each of 1 prompts, got 2"
    with pytest.raises(ValueError, match=words):
        llm.score_tokens(dict(prompt_token_ids=[1] * 5), routed_experts=[GOOD, GOOD])


@pytest.mark.devices(2)
def test_what_keeps_no_routes_is_refused(mixture, tmp_path):
    from tests.support import small_checkpoint

    folder = mixture("qwen3")[1]
    with pytest.raises(
        ValueError, match="routed_experts=True is of engines that run all stages, r"
    ):
        Worker(folder, **RANK, enable_return_routed_experts=True).read_checkpoint()
    with LLM(folder, **SIZES | OFF) as other:
        words = "routed_experts are replayed where routes are kept: build the LLM with enable_ret"
        with pytest.raises(ValueError, match=words):
            other.score_tokens(dict(prompt_token_ids=[1] * 5), routed_experts=[GOOD])
        assert other.report().startswith("device: ")
    with pytest.raises(ValueError, match=r"True wants a mixture of experts, .* is none"):
        LLM(str(small_checkpoint.save(tmp_path)), **SIZES)
