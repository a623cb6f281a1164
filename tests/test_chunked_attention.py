"""Layers whose tokens see their own chunk alone: what is kept, found again, and computed."""

from dataclasses import replace
import functools
import random
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, RequestOutputKind, SamplingParams, pytree
from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.caches.chunked import ChunkedLocalAttention
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.kernels_pallas import reference
from jaxrunner.kernels_pallas.mosaic import TOO_OLD
from jaxrunner.model import AttentionSpec
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.ops.attention import ATTENTION, rows_of
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from jaxrunner.scheduling.prefix import find_prefix
from jaxrunner.types import Batch, Inputs, LayerCache
from tests.support import tiny
from tests.support.checkpoints import NEEDS_TORCH
from tests.support.lowering import cuda, lowers
from tests.support.scheduling import cache_group

CHUNK, BLOCK = 16, 4
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, max_model_len=128, block_size=BLOCK, num_blocks=40, max_num_seqs=6,
    max_num_batched_tokens=24, token_buckets=(24,), decode_buckets=(6,), warm_up=False,
    cache_dir=None,
)  # fmt: skip


def chunked(block_size: int, chunk_size: int) -> CacheGroup:
    return CacheGroup(ChunkedLocalAttention(chunk_size), (), block_size, 0)


def needed(block_size: int, chunk_size: int, num_tokens: int) -> set[int]:
    """Returns the blocks of the first tokens that the next one sees."""
    seen = (i for i in range(num_tokens) if i // chunk_size == num_tokens // chunk_size)
    return {i // block_size for i in seen}


@pytest.mark.parametrize(("block_size", "chunk_size"), [(4, 8), (4, 6), (4, 3), (8, 4), (1, 1)])
def test_what_the_next_token_sees_is_kept_and_no_more(block_size, chunk_size):
    group, length = chunked(block_size, chunk_size), 41
    for num in range(length):
        seen = [i for i in range(num) if i // chunk_size == num // chunk_size]
        assert group.num_skipped_tokens(num) == (seen[0] if seen else num)
    for step in (1, 3, 8):
        most = 0
        for start in range(length):
            first = group.num_skipped_tokens(start) // block_size
            most = max(most, group.table_len(min(start + step, length)) - first)
        assert most <= group.max_blocks(length, step) <= group.table_len(length)


@pytest.mark.parametrize(("block_size", "chunk_size"), [(4, 8), (4, 6), (4, 3), (2, 10)])
def test_the_longest_prefix_is_found_whose_chunk_is_there(block_size, chunk_size):
    rng, hits, free = random.Random(0), 0, 0
    for _ in range(300):
        cached, limit = {i for i in range(12) if rng.random() < 0.6}, rng.randint(0, 40)
        ends = range(0, limit + 1, block_size)
        want = max(n for n in ends if needed(block_size, chunk_size, n) <= cached)
        found = chunked(block_size, chunk_size).longest_hit(cached.__contains__, limit)
        assert found == want
        hits += want > 0
        free += want > 0 and want // block_size - 1 not in cached
    # Where a chunk ends with a block, nothing before it need be there.
    assert hits > 100 and (free > 20 or chunk_size % block_size)


def test_chunks_agree_with_layers_that_keep_all():
    groups = [cache_group(4), chunked(4, 16)]
    assert find_prefix(groups, [lambda i: i < 7, lambda i: i in (4, 5)], 40) == 24
    assert find_prefix(groups, [lambda i: i < 7, lambda i: i == 5], 40) == 16
    assert find_prefix(groups, [lambda i: i < 3, lambda i: i in (0, 1, 4, 5)], 40) == 8


def test_empty_chunks_are_refused():
    with pytest.raises(ValueError, match="chunk_size must be at least 1 token, got 0"):
        ChunkedLocalAttention(0)


def test_kernels_do_not_run_where_rows_cannot_be_cut_by_chunks():
    batch: Any = SimpleNamespace(query_len=1, blocks=(jnp.zeros((2, 6), jnp.int32),))
    q, k = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((6, 4, 64), (9, 2, 8, 64)))
    cache: Any = SimpleNamespace(k=k)
    spec = AttentionSpec(0, None, 1.0, chunk_size=18)
    decode, mixed, plain = (functools.partial(one.refuses, batch) for one in ATTENTION)
    words = "wants chunks of whole blocks, of 8 tokens, got chunks of 18"
    assert decode(q, cache, spec) == words and plain(q, cache, spec) is None
    batch.query_len = 0
    assert mixed(q, cache, spec) == words
    # Requests that end within the first chunk see all before them.
    for fine in (16, 50):
        assert mixed(q, cache, spec._replace(chunk_size=fine)) == TOO_OLD  # None on a new JAX
    batch.query_len = 3
    assert decode(q, cache, spec._replace(chunk_size=16)) == (
        "wants one token of every row where there are chunks, got 3"
    )


H, K, D = 4, 2, 8
STEPS = {
    "decode": ([(0, 1), (7, 1), (8, 1), (0, 0), (22, 1)], 1),
    "prompts": ([(0, 21), (5, 1), (7, 2), (0, 0), (13, 11)], 0),
    "chunks begin": ([(8, 8), (16, 3), (15, 1), (23, 1), (0, 24)], 0),
    "nothing": ([], 0),
}


@pytest.mark.parametrize(("rows", "query_len"), STEPS.values(), ids=STEPS.keys())
def test_rows_of_one_chunk_see_what_tokens_of_chunks_see(rows, query_len):
    """What kernels are given, against the mask; both in plain JAX."""
    B, T, M, C = 6, 6 if query_len else 40, 6, 8
    rng, nums = np.random.default_rng(0), np.zeros(B, np.int32)
    nums[: len(rows)] = [num for _, num in rows]
    lens = nums + np.array([first for first, _ in rows] + [0] * (B - len(rows)), np.int32)
    lens = np.where(nums > 0, lens, 0).astype(np.int32)
    start = np.concatenate([[0], np.cumsum(np.ones(B) if query_len else nums)]).astype(np.int32)
    row, places = np.full(T, B, np.int32), np.zeros(T, np.int32)
    for b, num in enumerate(nums):
        row[start[b] : start[b] + num] = b
        places[start[b] : start[b] + num] = np.arange(lens[b] - num, lens[b])
    blocks = jnp.asarray(rng.permutation(B * M).reshape(B, M).astype(np.int32))
    none = jnp.zeros(T, jnp.int32)
    batch = Batch(
        inputs=Inputs(none, jnp.asarray(places), none), row=jnp.asarray(row), slot=none,
        cache_index=(), query_start=jnp.asarray(start), seq_lens=jnp.asarray(lens),
        blocks=(blocks,), logits_indices=none, query_len=query_len,
    )  # fmt: skip
    k, v = (jnp.asarray(rng.normal(size=(B * M, K, BLOCK, D)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.normal(size=(T, H, D)), jnp.float32)
    cache = LayerCache(k=k, v=v, k_scale=None, v_scale=None)
    spec = AttentionSpec(0, None, 0.3, chunk_size=C)
    attend = jax.jit(reference.attend, static_argnums=3)
    want = np.asarray(attend(batch, q, cache, spec))
    starts, seen, tables = jax.jit(rows_of, static_argnums=(1, 2))(batch, spec, BLOCK)
    cut = replace(
        batch, inputs=replace(batch.inputs, positions=batch.inputs.positions % C),
        query_start=starts, seq_lens=seen, blocks=(tables,),
    )  # fmt: skip
    got = np.asarray(attend(cut, q, cache, spec._replace(chunk_size=None)))
    live = row < B
    assert tables.shape[1] * BLOCK == C and int(seen.max()) <= C
    np.testing.assert_allclose(got[live], want[live], atol=1e-6)
    assert not rows or np.abs(want[live]).max() > 0.1


DECODE, PREFILL, PLAIN = "decode_attention", "prefill_attention", "plain JAX"


@lowers
@pytest.mark.parametrize(
    ("max_model_len", "bucket", "names"),
    [
        (1024, Bucket(64, 64, 1), {DECODE}),
        (1024, Bucket(256, 64), {PREFILL}),
        (96, Bucket(192, 64, 3), {DECODE}),
        (1024, Bucket(192, 64, 3), {DECODE, PLAIN}),  # of layers without chunks, and with
    ],
    ids=["decode", "prompts", "drafts of one chunk", "drafts"],
)
def test_kernels_run_on_rows_of_chunks(max_model_len, bucket, names):
    large = SETTINGS | dict(hidden_size=1024, num_attention_heads=8, num_hidden_layers=2)
    large |= dict(attention_chunk_size=128, no_rope_layers=[1, 0], max_position_embeddings=2048)
    model, config = read_model(Settings(large))
    sizes: dict[str, Any] = dict(max_model_len=max_model_len, num_blocks=100, block_size=64)
    engine = tiny.engine_config(dtype="bfloat16", kv_dtype="bfloat16", **sizes)
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(model, config, engine, backends.fused, RULES)
    with cuda():
        told = operations(program, params, Key("step", bucket))
    assert {one.name for one in told if one.operation == "attention"} == names


@pytest.fixture(scope="module")
def mixtures():
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    pytest.importorskip("transformers", reason=NEEDS_TORCH)
    from tests.support import mixtures

    return mixtures


def likeliest(module: Any, ids: list[int]) -> list[int]:
    import torch

    with torch.no_grad():
        return module(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()


def test_preempted_and_alone_requests_keep_a_chunk_and_tell_the_tokens_of_transformers(
    mixtures, tmp_path
):
    module = mixtures.model("llama 4")
    module.save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    asked = [rng.integers(1, 62, n).tolist() for n in (3, 15, 16, 17, 33, 40, 51, 90)]
    params = SamplingParams(
        temperature=0, max_tokens=25, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    with LLM(str(tmp_path), **SIZES) as llm:
        engine = llm.engine
        told = llm.generate([dict(prompt_token_ids=ids) for ids in asked], params, use_tqdm=False)
        assert engine.scheduler.num_preemptions
        for prompt, output in zip(asked, told, strict=True):
            new = list(output.outputs[0].token_ids)
            assert new == likeliest(module, prompt + new)[len(prompt) - 1 : -1]
        engine.reset_prefix_cache()
        in_use = [0, 0]
        for _ in llm.stream(dict(prompt_token_ids=asked[-1]), params):
            now = [pool.num_blocks - pool.num_free for pool in engine.pools]
            in_use = [*map(max, in_use, now)]
        # Of a chunk and a step's tokens, whatever the length; the other layers keep all.
        assert in_use[0] <= (CHUNK + 24) // BLOCK + 1 and in_use[1] >= (90 + 24) // BLOCK
        specs = [*llm.engine.worker.get_kv_cache_spec().values()]
        assert [spec.attention_chunk_size for spec in specs] == [CHUNK, None]


SETTINGS = dict(
    architectures=["Llama4ForCausalLM"], hidden_size=36, num_hidden_layers=4, vocab_size=62,
    num_attention_heads=6, num_key_value_heads=2, intermediate_size=44,
    max_position_embeddings=64,
)  # fmt: skip
WRONG = {
    "kinds": (
        dict(layer_types=["chunked_attention", "sliding_attention"] * 2),
        "layer_types must name chunked_attention or full_attention, and no_rope_layers",
    ),
    "too few": (dict(no_rope_layers=[1, 1, 0]), "a number, for 4 layers, got"),
    "no size": (dict(attention_chunk_size=None), "has no 'attention_chunk_size'"),
    "unknown": (dict(moe_every=2), "1 unknown setting: moe_every=2"),
    "tuning": (dict(attn_temperature_tuning="yes"), "must be .'bool', 'int'., got 'yes'"),
}


@pytest.mark.parametrize(("changes", "words"), WRONG.values(), ids=WRONG.keys())
def test_a_config_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(Settings(SETTINGS | changes))


def test_a_published_config_is_read():
    """Maverick has experts in every second layer, and says 4 for true."""
    values = SETTINGS | dict(
        attn_temperature_tuning=4, interleave_moe_layer_step=2, no_rope_layers=[],
        output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
        cache_implementation="hybrid", for_llm_compressor=False, num_experts_per_tok=1,
    )  # fmt: skip
    config: Any = read_model(Settings(values))[1]
    assert config.sparse == (False, True) * 2 and config.turned == (True, True, True, False)
    assert config.chunked == config.turned and config.head_dim == 128
    assert config.query_growth == (0.1, 8192) and config.intermediate_size == 16384
    assert config.moe_intermediate_size == config.shared_expert_intermediate_size == 44
    assert config.rope.inv_freq[1] == pytest.approx(5e5 ** (-2 / 128))
