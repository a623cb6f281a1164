"""Mixtures of experts: every family against transformers, token for token."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.hf_config import Settings
from jaxrunner.loading.loader import load
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import dense
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.types import Inputs

pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
pytest.importorskip("transformers", reason="the reference needs transformers")

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 23, 31, 33, 40, 51, 60)
PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in LENGTHS]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=16, max_model_len=128, block_size=8, num_blocks=400,
    token_buckets=(64,), decode_buckets=(16,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None,
)  # fmt: skip
NEW_TOKENS = dict(qwen3=64)  # 16 of other variants


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns what makes the model of a variant, and the folder that transformers saves it in."""
    from tests.support import mixtures

    @functools.cache
    def save(variant):
        model, folder = mixtures.model(variant), tmp_path_factory.mktemp("mixture")
        model.save_pretrained(folder)
        return SimpleNamespace(model=model, folder=folder)

    return save


def variants():
    from tests.support import mixtures

    return list(mixtures.VARIANTS)


def greedy(llm, prompts, count):
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return llm.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)


def tokens(outputs):
    return [list(out.outputs[0].token_ids) for out in outputs]


def logits_of(model, ids):
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("variant", variants())
def test_tokens_equal_those_of_transformers(variant, saved):
    """16 prompts at once, in chunks; then again from cached prefixes, in another order."""
    made, count = saved(variant), NEW_TOKENS.get(variant, 16)
    with LLM(str(made.folder), **SIZES) as llm:
        first = tokens(greedy(llm, PROMPTS, count))
        again = greedy(llm, PROMPTS[::-1], count)
    assert first == tokens(again)[::-1] and again[0].num_cached_tokens > 40
    # Each token is the likeliest one after those before it: by induction, what generate gives.
    for prompt, output in zip(PROMPTS, first, strict=True):
        want = logits_of(made.model, prompt + output)[len(prompt) - 1 : -1].argmax(-1)
        assert output == want.tolist()


@pytest.mark.parametrize("variant", variants())
def test_logits_equal_those_in_float64(variant, saved):
    """By the operations of a trainer, which have a gradient."""
    made, ids = saved(variant), PROMPTS[-1]
    loaded = load(made.folder)
    got = run(loaded.model, loaded.config, loaded.read_params(progress=False), jnp.asarray(ids))
    want = logits_of(made.model.double(), ids)
    made.model.float()
    np.testing.assert_allclose(got, want, atol=1e-4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(model, config, params, ids):
    """Returns the logits of one sequence, [T, V]."""
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    none = (None,) * config.num_hidden_layers
    hidden, _ = model.forward(config, params, none, inputs, dense(1))
    return model.logits(config, params, hidden)


SETTINGS = dict(
    architectures=["Qwen3MoeForCausalLM"], hidden_size=36, num_hidden_layers=2, vocab_size=62,
    num_attention_heads=6, num_key_value_heads=2, head_dim=8, intermediate_size=44,
    max_position_embeddings=64, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            dict(num_experts_per_tok=7),
            "num_experts_per_tok=7 experts must be of topk_group=1",
        ),
        (dict(num_experts=None), "has no 'num_experts': it is needed"),
        (dict(norm_topk_prob=2), "'norm_topk_prob' must be bool, got 2"),
        (dict(expert_choice=True), "1 unknown setting: expert_choice=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_routers_do_not_honour_is_refused(changes, words):
    settings = {k: v for k, v in (SETTINGS | changes).items() if v is not None}
    with pytest.raises(ValueError, match=words):
        read_model(Settings(settings))


def test_experts_that_do_not_divide_are_refused():
    model, config = read_model(Settings(SETTINGS | dict(moe_intermediate_size=15)))
    words = "does not divide Qwen3Moe.*moe_intermediate_size=15"
    with pytest.raises(ValueError, match=words):
        shard(model, config, make_mesh(2))


@pytest.mark.parametrize("name", ["enable_expert_parallel", "enable_eplb"])
def test_whole_experts_on_devices_are_refused(name):
    asked: dict[str, Any] = {name: True}
    with pytest.raises(ValueError, match=f"{name}=True.*tensor_parallel_size cuts every"):
        LLM("none", **asked)
