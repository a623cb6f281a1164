"""Decode context parallelism on a CPU's fake devices: what one gives, of tokens on several."""

import dataclasses
import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.caches.interleave import Interleave, Part
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas.attention.online_softmax import NOTHING
from jaxrunner.kernels_pallas.attention.split_kv_merge import join
from jaxrunner.kernels_pallas.reference import attend, online_softmax
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.model import AttentionSpec
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import Choice, paged
from jaxrunner.parallel import context
from jaxrunner.parallel.context import deal_out, merge
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.pipeline import deal
from jaxrunner.parallel.stages import whole_state
from jaxrunner.parallel.tensor import shard
from jaxrunner.types import LayerCache
from tests.outside.recurrent import RecurrentState
from tests.support import tiny
from tests.support.kernels import batch_of

SIZES: dict[str, Any] = dict(
    hidden_size=24, intermediate_size=32, num_attention_heads=8, vocab_size=64, head_dim=4
)
WINDOWS = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=6)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14),
    SamplingParams(temperature=0.9, seed=4, max_tokens=14, top_k=9, logprobs=2),
    SamplingParams(temperature=0.8, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=1),
]
# All with logprobs, for which no program of a whole step is compiled.
TOLD = [dataclasses.replace(PARAMS[0], logprobs=2), *PARAMS[1:]]
FIRST = [3, 1, 4, 1, 5, 9, 2, 6] * 2
PROMPTS = FIRST, [9, 2], list(range(1, 32)), [7] * 9, FIRST[:12]


def add(engine: Engine, params: list[SamplingParams]) -> list[Any]:
    return [engine.add(f"{i}", prompt, params[i % 3]) for i, prompt in enumerate(PROMPTS)]


def joined(parts: list[Any]) -> Any:
    """Returns what was told of a request's tokens in parts, in one."""
    return jax.tree.map(lambda *x: np.concatenate(x), *parts) if parts else ()


def answers(engine: Engine, params: list[SamplingParams]) -> tuple[list[Any], list[Any]]:
    """Returns tokens and logprobs of requests that crowd each other, and of one that goes on."""
    requests = add(engine, params)
    while engine.has_unfinished:
        engine.step()
    requests += [engine.add("on", [*FIRST, *requests[0].output_token_ids], params[0])]
    while engine.has_unfinished:
        engine.step()
    assert requests[-1].num_cached_tokens > 0
    told = [(joined(r.logprobs), joined(r.prompt_logprobs)) for r in requests]
    return [r.output_token_ids for r in requests], told


def one_and_several(folder: Path, kv_heads: int, num: int, interleave: Interleave, **changes):
    """Returns an engine on one device, and one of the same weights on several."""
    sizes = dict(num_blocks=64, max_num_batched_tokens=16, token_buckets=(16,))
    kinds = {name: changes.pop(name) for name in WINDOWS | tiny.LATENTS if name in changes}
    settings = tiny.SETTINGS | SIZES | kinds | dict(num_key_value_heads=kv_heads)
    one = family, config = read_model(Settings(settings))
    params = tiny.random_params(config, seed=3, params=family.params)
    save_checkpoint(folder, family, config, params, settings)
    if (stages := changes.pop("stages", 1)) > 1:
        several = deal(family, config, stages, num, interleave=interleave)
    else:
        several = shard(family, config, make_mesh(num), interleave)
    for (model, own), given in ((one, {}), (several, changes)):
        params = load_params(folder, model, own, dtype="float32", progress=False)
        kv = {name: changes[name] for name in ("kv_dtype",) if name in changes}
        yield Engine(model, own, tiny.engine_config(**sizes | kv | given), params)


@pytest.mark.slow
@pytest.mark.devices(8)
@pytest.mark.parametrize(
    "kv_heads,num,interleave,params,changes",
    [
        (1, 4, (4, 1), PARAMS, dict(num_blocks=9, block_size=3, kv_dtype="int8")),
        (
            8, 4, (2, 2), TOLD,
            dict(num_blocks=15, block_size=4, kv_dtype="int8", stages=2, **tiny.LATENTS),
        ),
        (2, 8, (4, 2), TOLD, dict(num_blocks=24, block_size=2, num_decode_steps=2, **WINDOWS)),
    ],
    ids=[
        "8 bits, preempted", "latents in stages, 8 bits, preempted",
        "windows, runs of 2, several steps",
    ],
)  # fmt: skip
def test_tokens_are_those_of_one_device(kv_heads, num, interleave, params, changes, tmp_path):
    one, several = one_and_several(tmp_path, kv_heads, num, Interleave(*interleave), **changes)
    (want, logprobs), (got, told) = (answers(engine, params) for engine in (one, several))
    assert got == want
    for ours, theirs in zip(jax.tree.leaves(told), jax.tree.leaves(logprobs), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)
    assert (several.scheduler.num_preemptions > 0) == (changes["num_blocks"] < 20)
    # A device holds one KV head or latent, and of each token's keys as many copies as it must.
    config, state = several.config, whole_state(several.model_config, several.runner.state)
    cache = jax.tree.leaves(state.kv[0])[0]
    *_, S, _ = cache.sharding.shard_shape(cache.shape)
    assert S == config.block_size and math.prod(cache.shape[1:-1]) == num * S
    (pool,) = several.pools
    assert pool.block_size == interleave[0] * config.block_size
    _goes_on(several, params, want, tmp_path / "saved")


def _goes_on(engine: Engine, params: Any, want: list[list[int]], path: Path) -> None:
    """Checks that a snapshot in the midst of the requests ends with the same tokens."""
    requests = add(engine, params)
    for _ in range(6):
        engine.step()
    save_engine(engine, path)
    engine.abort([request.request_id for request in requests])
    live = restore_engine(engine, path).requests
    while engine.has_unfinished:
        engine.step()
    assert len(live) > 2
    assert {name: r.output_token_ids for name, r in live.items()} == {n: want[int(n)] for n in live}


def test_parts_are_merged_as_if_they_were_one():
    C, T, S, D = 3, 5, 4, 8
    rng = np.random.default_rng(0)
    scores, values = rng.normal(0, 30, (C, T, S)), rng.normal(size=(C, T, S, D))
    scores[1] = scores[:, 1] = scores[:2, 2] = -np.inf  # a part, a token, both parts but one
    with np.errstate(divide="ignore"):
        weight = np.logaddexp.reduce(scores, -1)
    shares = np.exp(scores - np.where(np.isinf(weight), 0, weight)[..., None])
    parts = np.concatenate([np.einsum("cts,ctsd->ctd", shares, values), weight[..., None]], -1)
    with jax.debug_nans(True):
        got = merge(jnp.asarray(parts, jnp.float32))
    flat = np.moveaxis(scores, 0, 1).reshape(T, C * S)
    best = flat.max(-1, keepdims=True)
    p = np.exp(flat - np.where(np.isinf(best), 0, best))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    want = np.einsum("ts,tsd->td", p, np.moveaxis(values, 0, 1).reshape(T, C * S, D))
    assert not want[1].any()
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("length", [2, 45])
def test_parts_of_the_keys_give_what_all_of_them_do(window, length):
    C, size, S, M, D, Q = 3, 2, 4, 5, 8, 2
    keys = jax.random.split(jax.random.key(2), 3)
    k, v = (jax.random.normal(key, (M, 1, S * C, D)) for key in keys[:2])
    q = jax.random.normal(keys[2], (1, 1, 2, Q, D))
    pos, blocks = jnp.arange(length - Q, length)[None], jnp.arange(M)[None]
    lens = jnp.full(1, length)
    spec = AttentionSpec(0, window, 0.5)
    want = online_softmax(q, pos, blocks, lens, LayerCache(k, v, None, None), spec, chunk=8)
    found = []
    for index in range(C):
        part = Part(C, size, index)
        at = part.position(jnp.arange(S))
        # What lies behind the request may be anything.
        own = [jnp.where(jnp.arange(M)[:, None] * S * C + at[None] < length, 0, jnp.nan)] * 2
        own = [x[:, :, at] + more[:, None, :, None] for x, more in zip((k, v), own, strict=True)]
        cache = LayerCache(own[0], own[1], None, None)
        found.append(online_softmax(q, pos, blocks, lens, cache, spec, part, chunk=8))
    np.testing.assert_allclose(merge(jnp.stack(found)), want, atol=1e-5)


def test_items_of_a_kernel_are_joined_as_parts_are():
    rng = np.random.default_rng(1)
    row, num_rows = np.array([0, 0, 0, 1, 2, 2, 3, 3]), 3  # the last items are of no row
    part, weight = rng.normal(size=(8, 2, 3, 4)), rng.normal(0, 20, (8, 2, 3, 1))
    part[3], weight[3] = 0, NOTHING  # a row without keys
    part[6:], weight[6:] = np.nan, np.nan  # nobody has written these
    given = [jnp.asarray(x, jnp.float32) for x in (part, weight)]
    got = join(given[0], given[1], jnp.asarray(row), num_rows)
    assert np.isfinite(got).all() and not got[1, ..., :-1].any() and (got[1, ..., -1] < -1e29).all()
    parts = np.concatenate([part, weight * np.log(2)], -1)
    for b in (0, 2):
        np.testing.assert_allclose(
            got[b, ..., :-1], merge(jnp.asarray(parts[row == b], jnp.float32)), atol=1e-5
        )
        total = np.logaddexp.reduce(parts[row == b][..., -1], 0)
        np.testing.assert_allclose(got[b, ..., -1], total, rtol=1e-5, atol=1e-5)


LLM_SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(4,),
    max_model_len=48, dtype="float32", warm_up=False, use_tqdm=False, num_blocks=16, block_size=8,
)  # fmt: skip


@pytest.mark.devices(4)
@pytest.mark.slow
def test_an_llm_drafts_and_sleeps_and_keeps_more_tokens_in_as_many_bytes(tmp_path):
    settings = tiny.SETTINGS | SIZES | dict(num_hidden_layers=1)
    config = tiny.config(**settings)
    save_checkpoint(tmp_path, llama, config, tiny.random_params(config, seed=3), settings)
    itself = dict(method="draft_model", model=str(tmp_path), num_speculative_tokens=2)
    several: dict[str, Any] = dict(
        tensor_parallel_size=4, decode_context_parallel_size=2, speculative_config=itself
    )
    prompts = [{"prompt_token_ids": [*prompt]} for prompt in PROMPTS[:4]]
    plans, want = [], []

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, PARAMS[0], on_error="raise")
        return [output.outputs[0].token_ids for output in outputs]

    for more in ({}, several):
        with LLM(str(tmp_path), skip_tokenizer_init=True, **LLM_SIZES | more) as llm:
            plans.append(llm.memory_plan)
            if not more:
                want = tokens(llm)
                continue
            assert tokens(llm) == want
            assert "accepted by position: 1.00 1.00" in llm.report()  # its caches are right, too
            assert "attends to a part of each request's tokens" in llm.report()
            llm.sleep(level=1)
            llm.wake_up()
            assert tokens(llm) == want
    assert plans[1].num_tokens == 2 * plans[0].num_tokens == 2 * 16 * 8
    # Of two models, one of two KV heads, and in each block half the tokens.
    assert plans[1].kv == plans[0].kv


@pytest.mark.devices(4)
@pytest.mark.parametrize(
    "sizes,words",
    [
        (dict(tensor_parallel_size=4, decode_context_parallel_size=4), r"=4 must divide tensor_p"
         r"arallel_size=4 into a multiple of .*num_key_value_heads=2: take one of 1, 2$"),
        (dict(decode_context_parallel_size=2), r"tensor_parallel_size=1 into .*: take one of 1$"),
        (dict(tensor_parallel_size=2, cp_kv_cache_interleave_size=2),
         r"cp_kv_cache_interleave_size=2 is of tokens that are dealt out to devices: leave it out"),
        (dict(tensor_parallel_size=4, decode_context_parallel_size=2, block_size=16,
              dcp_kv_cache_interleave_size=12), r"=12 must divide block_size=16: change one of th"),
        (dict(prefill_context_parallel_size=2), r"prefill_context_parallel_size=2 is not suppor"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_out_is_refused_by_name(sizes, words):
    with pytest.raises(ValueError, match=words):
        LLM(str(embedded.PATH), **LLM_SIZES | sizes)


def test_other_caches_than_of_keys_and_values_are_refused_by_name():
    config: Any = SimpleNamespace(
        architecture="Other", interleave=Interleave(2), cache_kinds=(RecurrentState(2),)
    )
    with pytest.raises(ValueError, match="=2 deals out keys and values, Other has RecurrentState"):
        deal_out(Choice("reference", paged, ""), config, tiny.engine_config())


@pytest.mark.gpu
@pytest.mark.parametrize("query_len,size,lens", [(1, 1, (1, 0, 300, 4097)), (3, 4, (3, 7, 900))])
def test_decode_attention_of_a_part_is_what_the_reference_says(query_len, size, lens):
    (K, H, D, S), C, B = (1, 16, 128, 64), 2, len(lens)
    M = -(-max(lens) // (S * C))
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (B * query_len, H, D), (B * M, K, S, D), (B * M, K, S, D)
    q, k, v = map(functools.partial(jax.random.normal, dtype="bfloat16"), keys, shapes)
    blocks = jnp.asarray(np.random.default_rng(2).permutation(B * M).reshape(B, M), jnp.int32)
    starts = np.arange(B + 1) * query_len
    num = np.minimum(lens, query_len)
    whole = B * M, K, S * C, D
    batch = batch_of(B * query_len, starts, lens, blocks, whole, query_len=query_len, num=num)
    spec, cache = AttentionSpec(0, None, 0.3), LayerCache(k, v, None, None)
    # In float32, where the reference does not round queries times their scale.
    wide = [x.astype(jnp.float32) for x in (q, k, v)]
    exact = LayerCache(wide[1], wide[2], None, None)
    real = np.asarray(batch.row < B)
    for index in range(C):
        part = Part(C, size, index)
        args = batch, q, cache, spec, part
        assert context._refuses_decode(*args) is None
        want = np.array(jax.jit(functools.partial(attend, batch, wide[0], exact, spec, part))())
        got = np.array(jax.jit(functools.partial(context._decode, *args))())
        # No keys weigh nothing in both.
        want[..., -1], got[..., -1] = (np.maximum(x[..., -1], -1e4) for x in (want, got))
        np.testing.assert_allclose(got[real], want[real], atol=0.02)
        assert np.isfinite(got).all()
