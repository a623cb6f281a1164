"""A request's logits are the same bits whatever else is in its batch, in each bucket."""

from dataclasses import replace
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.program.bucket import Bucket
from jaxrunner.runner import model_runner
from jaxrunner.step import prepare_inputs
from jaxrunner.types import Plan, Writes
from tests.support.request_table import table

TOKENS, ROWS, NEW = (16, 64, 256), (1, 4, 16), 5
SIZES: dict[str, Any] = dict(
    load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16, max_num_batched_tokens=256,
    token_buckets=TOKENS, decode_buckets=ROWS, max_model_len=288, block_size=16, num_blocks=80,
    enable_prefix_caching=False, warm_up=False, cache_dir=None,
)  # fmt: skip
# Hidden, expert and head dimensions, those of latents, and of their rotated part.
SMALL, SERVED = (36, 20, 8, 10, 4), (512, 256, 128, 128, 64)
FAMILIES = "Qwen3Moe", "GptOss", "DeepseekV3"


def settings(family: str, E: int, F: int, D: int, rank: int, rotated: int) -> dict[str, Any]:
    """Returns the keys of a `config.json`."""
    common: dict[str, Any] = dict(
        architectures=[f"{family}ForCausalLM"], vocab_size=320, hidden_size=E, intermediate_size=F,
        num_hidden_layers=2, num_attention_heads=8, num_experts_per_tok=4,
        max_position_embeddings=512,
    )  # fmt: skip
    if family == "DeepseekV3":
        return common | dict(
            n_routed_experts=16, n_shared_experts=1, moe_intermediate_size=F, n_group=4,
            topk_group=2, first_k_dense_replace=1, routed_scaling_factor=2.5, q_lora_rank=None,
            kv_lora_rank=rank, qk_nope_head_dim=D, qk_rope_head_dim=rotated, v_head_dim=D,
            num_key_value_heads=8,
        )  # fmt: skip
    common |= dict(num_key_value_heads=2, head_dim=D)
    if family == "GptOss":
        return common | dict(num_local_experts=16, sliding_window=24)
    return common | dict(num_experts=16, moe_intermediate_size=F, norm_topk_prob=True)


@pytest.fixture(
    scope="module",
    params=[
        "Qwen3Moe",
        *(pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES[1:]),
        *(pytest.param(f"{family}, kernels", marks=pytest.mark.gpu) for family in FAMILIES),
    ],
)
def llm(request, tmp_path_factory):
    family, by_kernels, _ = request.param.partition(", kernels")
    folder = tmp_path_factory.mktemp("mixture")
    values = settings(family, *(SERVED if by_kernels else SMALL))
    (folder / "config.json").write_text(json.dumps(values))
    more: dict[str, Any] = dict(dtype="float32")
    if by_kernels:
        more = dict(dtype="bfloat16", batch_invariant=True)
    with LLM(folder, **SIZES, **more) as made:
        if by_kernels:
            told = [one for of in made.operations().values() for one in of]
            assert {one.name for one in told if one.operation == "experts"} == {"grouped_mlp"}
        yield made


def tell(llm: LLM, prompts: list[list[int]], at: int, num_others: int) -> np.ndarray:
    """Returns the logprobs, [N, V], of the prompt `at`. num_others: new tokens of each other."""
    given: Any = [dict(prompt_token_ids=ids) for ids in prompts]
    counts = [NEW if i == at else num_others for i in range(len(prompts))]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, logprobs=-1)
              for n in counts]  # fmt: skip
    out: Any = llm.generate(given, params, use_tqdm=False)[at].outputs[0]
    return np.array([[row[token].logprob for token in sorted(row)] for row in out.logprobs])


def buckets(llm: LLM) -> set[int]:
    """Returns the buckets of all steps since the last call, by their tokens; less than 0 decode."""
    found = set()
    for query_len, counts in llm.runner.traffic.items():
        sizes = ROWS if query_len else TOKENS
        found |= {min(size for size in sizes if size >= n) * (-1) ** query_len for n in counts}
        counts.clear()
    return found


@pytest.mark.parametrize(
    ("bucket", "num_tokens", "few", "many", "num_others"),
    [
        ((16, 4), 9, [2], [2, 3, 2], NEW),
        ((64, 16), 40, [3] * 4, [1] * 15, NEW),
        ((256, 1), 200, [], [40, 10], 1),
    ],
    ids=["few tokens", "many requests", "many tokens"],
)
def test_logprobs_are_the_same_bits(bucket, num_tokens, few, many, num_others, llm):
    """First with few others or none; then behind others whose tokens crowd the same experts."""
    rng = np.random.default_rng(0)
    own, *others = (rng.integers(1, 300, n).tolist() for n in (num_tokens, *few))
    buckets(llm)
    want = tell(llm, [own, *others], 0, num_others)
    assert buckets(llm) == {bucket[0], -bucket[1]}
    got = tell(llm, [*([7] * n for n in many), own], len(many), num_others)
    assert buckets(llm) == {bucket[0], -bucket[1]}
    assert want.shape == (NEW, 320)
    np.testing.assert_array_equal(got, want)


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (dict(tensor_parallel_size=2), "wants sums on one device, got 2 devices that sum together"),
        (dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)),
         "wants one token of a request a step, speculative_config drafts more"),
    ],
)  # fmt: skip
def test_what_goes_by_all_requests_is_refused(sizes, words):
    with pytest.raises(ValueError, match=f"batch_invariant=True {words}"):
        LLM(str(embedded.PATH), max_model_len=64, batch_invariant=True, **sizes)


def test_a_step_is_one_with_adapters_whether_or_not_a_request_has_one(monkeypatch):
    asked, choose = [], model_runner.choose

    def chosen(*args: Any, lora: bool, **more: Any) -> Any:
        asked.append(lora)
        return choose(*args, lora=lora, **more)

    monkeypatch.setattr(model_runner, "choose", chosen)
    sizes: dict[str, Any] = dict(max_model_len=64, num_blocks=16, max_num_seqs=2, warm_up=False)
    for batch_invariant in (False, True):
        with LLM(
            str(embedded.PATH), enable_lora=True, batch_invariant=batch_invariant, **sizes
        ) as llm:
            llm.generate("def", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
        assert asked and set(asked) == {batch_invariant}
        asked.clear()


def test_a_request_that_has_ended_keeps_its_place_in_a_step():
    """Decodes of a mixed step are its first rows, also behind one that the host takes to go on."""
    sizes: dict[str, Any] = dict(total_len=[9, 9, 9, 5], num_computed=[8, 8, 8, 0])
    none = Writes(*(jnp.zeros(0, jnp.int32),) * 3)
    plan = Plan(jnp.arange(4, dtype=jnp.int32), jnp.array([1, 1, 1, 5], jnp.int32), (none,))
    requests = table(**sizes)
    ended = replace(requests, done=jnp.array([True, False, False, False]))
    of = jax.jit(prepare_inputs, static_argnums=(2, 3))
    (want, _), (got, rows) = (of(x, plan, Bucket(16, 4, 0), ((32, 4),)) for x in (requests, ended))
    assert want.query_start.tolist() == got.query_start.tolist() == [0, 1, 2, 3, 8]
    assert got.row.tolist() == [4, *want.row.tolist()[1:]]
    assert got.seq_lens.tolist() == [0, 9, 9, 5]
    assert rows.samples.tolist() == [False, True, True, True]
