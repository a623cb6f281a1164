"""Pools of layers with and without a window: what they share, hold, and how many requests run."""

from dataclasses import replace
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, RequestOutputKind, SamplingParams
from jaxrunner.caches.cache_group import PoolSizes, cache_groups
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.config import EngineConfig
from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import dense, paged
from jaxrunner.program.program import Program
from jaxrunner.types import Inputs
from jaxrunner.worker.cache_costs import CacheCosts

SIZES = PoolSizes(
    block_size=64, num_blocks=0, max_model_len=32768, num_slots=256, max_num_batched_tokens=8192
)
KINDS = (*[SlidingWindow(1024)] * 5, FullAttention())


def pools(num_blocks: int, **sizes: Any) -> tuple[int, ...]:
    """Returns the blocks of the window's pool and of the full one."""
    made = cache_groups(KINDS, SIZES._replace(num_blocks=num_blocks, **sizes))
    return tuple(group.num_blocks for group in made)


@pytest.mark.parametrize(
    ("num_blocks", "sizes", "of_window"),
    [
        (7000, {}, 1000),  # half of 2000, of which six layers took what these take
        (7000, dict(max_model_len=4096), 4265),  # as many slots as the other layers hold
        (70000, dict(num_slots=8), 2 * (8 * 19 + 128)),  # all that slots can own, twice
        (600, {}, 146),  # no less than one request owns
        (100, {}, 100),
        (7000, dict(max_num_batched_tokens=64), 1000),
    ],
    ids=["half", "slots", "most", "one request", "short of one", "small steps"],
)
def test_windows_have_fewer_blocks(num_blocks, sizes, of_window):
    assert pools(num_blocks, **sizes) == (of_window, num_blocks)


def test_windows_alone_share_with_nobody():
    sizes = SIZES._replace(num_slots=2)
    found = [
        cache_groups([SlidingWindow(1024)], sizes._replace(num_blocks=n))[0].num_blocks
        for n in (10, 300, 10**6)
    ]
    assert found == [10, 300, 2 * (2 * 19 + 128)]


GEMMA = dict(
    architectures=["Gemma3ForCausalLM"], hidden_size=3840, intermediate_size=15360,
    num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    sliding_window=1024, sliding_window_pattern=6, max_position_embeddings=131072,
    vocab_size=262208, query_pre_attn_scalar=256, torch_dtype="bfloat16",
)  # fmt: skip


@pytest.mark.parametrize("max_num_seqs", [16, 64, 256])
def test_three_times_the_requests_of_32k_fit(max_num_seqs):
    """Gemma 3 12B beside its weights on a GPU of 141 GB; and short ones are half as many or all."""
    model, config = read_model(Settings(GEMMA))
    kinds: Any = config
    full = replace(kinds, windows=(None,) * 48)
    length, kv_bytes = 32768, 60 * 10**9
    engine = EngineConfig(
        max_model_len=length, num_blocks=1, max_num_seqs=max_num_seqs, dtype="bfloat16",
        kv_dtype="bfloat16",
    )  # fmt: skip
    costs, before = (CacheCosts(Program(model, c, engine, paged)) for c in (config, full))
    num, alike = (each.num_blocks(kv_bytes, length) for each in (costs, before))
    assert costs.num_bytes(num, length) <= kv_bytes < costs.num_bytes(num + 1, length) or (
        num == length // 64 * max_num_seqs
    )
    requests = num * 64 // length
    assert requests >= min(3 * (alike * 64 // length), max_num_seqs)
    of_window = next(
        group.num_blocks
        for group in Program(model, config, replace(engine, num_blocks=num), paged).cache_groups
        if group.kind == SlidingWindow(1024)
    )
    # What each request sees, and what a step of them all computes.
    assert requests * (1024 // 64 + 2) + 8192 // 64 <= of_window
    assert of_window >= min(alike // 2, max_num_seqs * 18 + 128)


LENGTH = 512
TINY = GEMMA | dict(
    hidden_size=36, intermediate_size=44, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=LENGTH,
    vocab_size=62, query_pre_attn_scalar=12, torch_dtype="float32",
)  # fmt: skip
WHOLE = 6 * 2 * 2 * 8 * 4 * LENGTH  # bytes of a request in caches without windows


@jax.jit
def likeliest(params: Any, ids: jax.Array) -> jax.Array:
    """Returns the token after each of a sequence, without a cache."""
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    model, config = read_model(Settings(TINY))
    hidden, _ = model.forward(config, params, (None,) * 6, inputs, dense(1))
    return model.logits(config, params, hidden).argmax(-1)


@pytest.mark.slow
def test_six_requests_run_where_two_would_fit_into_full_caches(tmp_path):
    """None is preempted; tokens are those without a cache, behind prefixes that are found, too."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    rng, most = np.random.default_rng(0), 0
    prompts = [rng.integers(0, 62, LENGTH - 60).tolist() for _ in range(6)]
    params = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.CUMULATIVE
    )
    asked, found = [dict(prompt_token_ids=prompt) for prompt in prompts], {}
    with LLM(
        tmp_path, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=2 * WHOLE,
        block_size=4, max_num_seqs=6, max_num_batched_tokens=64, token_buckets=(64,),
        decode_buckets=(6,), warm_up=False, cache_dir=None,
    ) as llm:  # fmt: skip
        assert llm.memory_plan.kv <= 2 * WHOLE
        for part in llm.stream(asked, params):
            most = max(most, len(llm.engine.scheduler.running))
            found[int(part.request_id)] = part
        assert most == 6 and not llm.engine.scheduler.num_preemptions
        window, full = sorted(pool.num_blocks for pool in llm.engine.pools)
        assert full == 6 * LENGTH // 4 and window * 4 < full
        again = llm.generate(asked[-1], params, use_tqdm=False)[0]
        told = [[*found[i].outputs[0].token_ids] for i in sorted(found)]
        assert again.num_cached_tokens == LENGTH - 64 and len({*map(tuple, told)}) > 1
        told.append([*again.outputs[0].token_ids])
        for prompt, tokens in zip([*prompts, prompts[-1]], told, strict=True):
            want = likeliest(llm.params, jnp.asarray([*prompt, *tokens]))
            assert want[len(prompt) - 1 : -1].tolist() == tokens
