"""Drafts of models with states: the next step replays the inputs of those that stand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams
from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.registry import read_model
from jaxrunner.speculators import eagle
from tests.support import hybrids, tiny
from tests.support.drafters import random_like

SIZES: dict[str, Any] = hybrids.LLM_SIZES | dict(
    enable_prefix_caching=True, mamba_block_size=8, num_state_checkpoints=40,
    speculative_config=dict(
        method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3
    ),
)  # fmt: skip
ALLOWED = [3, 11, 30]  # outputs of few tokens, which look-ups find, and of which some are right
RNG = np.random.default_rng(1)
PROMPTS = [RNG.choice([*ALLOWED, 5, 40, 7], n).tolist() for n in (3, 9, 17, 30, 41, 24)]
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=25, ignore_eos=True, allowed_token_ids=ALLOWED
)  # fmt: skip
VARIANTS = ["qwen 3 next", "lfm 2", "falcon h1", "nemotron h"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_change_no_token(variant, tmp_path):
    """In steps that mix them with prompts, behind checkpoints and after preemptions."""
    module = hybrids.save(variant, tmp_path)
    asked = [dict(prompt_token_ids=prompt) for prompt in PROMPTS]
    with LLM(tmp_path, **SIZES) as llm:
        cold = llm.generate(asked, GREEDY, use_tqdm=False)
        warm = llm.generate(asked[::-1], GREEDY, use_tqdm=False)[::-1]  # the last used first
        assert llm.engine.scheduler.num_preemptions
        assert all(pool.num_free == pool.num_blocks for pool in llm.engine.pools)
    assert sum((output.num_cached_tokens or 0) > 0 for output in warm) > 0
    metrics: list[Any] = [output.metrics for output in (*cold, *warm)]
    accepted = sum(sum(one.num_accepted_tokens_per_pos) for one in metrics)
    assert 30 < accepted < sum(one.num_draft_tokens for one in metrics) - 30
    told = [list(output.outputs[0].token_ids) for output in cold]
    assert told == [list(output.outputs[0].token_ids) for output in warm]
    for prompt, tokens in zip(PROMPTS, told, strict=True):
        logits = hybrids.logits(module, prompt + tokens)[len(prompt) - 1 : -1, ALLOWED]
        assert tokens == np.array(ALLOWED)[logits.argmax(-1)].tolist()


SAMPLED = SamplingParams(
    temperature=0.8, seed=5, max_tokens=25, ignore_eos=True, allowed_token_ids=ALLOWED
)  # fmt: skip


def save_eagle(folder: Path, target: Path) -> None:
    """Writes an EAGLE head of random weights for a model."""
    _, config = read_model(Settings(json.loads((target / "config.json").read_text())))
    settings = tiny.SETTINGS | dict(
        architectures=["LlamaForCausalLM"], hidden_size=config.hidden_size, num_hidden_layers=1,
        vocab_size=config.vocab_size, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    head = eagle.read(Settings(settings), config, frozenset())
    save_checkpoint(folder, eagle.eagle, head, random_like(eagle.Params, head.dims, 3), settings)


def answers(folder: Path, drafts: Any) -> tuple[list[list[list[int]]], list[int]]:
    """Returns tokens, with and without cached prefixes, and how many drafts stood, by rule."""
    sizes: dict[str, Any] = SIZES | dict(num_decode_steps=3, speculative_config=drafts)
    asked, told, accepted = [dict(prompt_token_ids=prompt) for prompt in PROMPTS], [], []
    with LLM(folder, **sizes) as llm:
        for params in (GREEDY, SAMPLED):
            llm.reset_prefix_cache()
            cold, warm = (llm.generate(asked, params, use_tqdm=False) for _ in range(2))
            assert sum((output.num_cached_tokens or 0) > 0 for output in warm)
            told += [[list(output.outputs[0].token_ids) for output in of] for of in (cold, warm)]
            metrics: list[Any] = [output.metrics for output in (*cold, *warm)]
            accepted.append(sum(sum(one.num_accepted_tokens_per_pos or ()) for one in metrics))
    return told, accepted


@pytest.mark.slow
def test_drafts_of_several_steps_change_no_token(tmp_path):
    """In launches of several steps, from checkpoints, and drafted from hidden states too."""
    folder, drafter = tmp_path / "model", tmp_path / "drafter"
    hybrids.save("nemotron h", folder)
    save_eagle(drafter, folder)
    want, _ = answers(folder, None)
    assert want[0] == want[1] and want[2] == want[3]
    by_head = dict(method="eagle", num_speculative_tokens=3, model=str(drafter))
    for drafts, least in ((by_head, 4), (dict(method="suffix", num_speculative_tokens=3), 30)):
        told, accepted = answers(folder, drafts)
        assert told == want
        assert min(accepted) > least  # random weights draft few tokens that stand


def test_a_drafter_has_no_states(tmp_path: Path):
    """Its passes write over what the one before has kept."""
    hybrids.save("lfm 2", tmp_path)
    drafts: Any = dict(method="draft_model", model=str(tmp_path), num_speculative_tokens=2)
    text = "a rejected token is written over, Lfm2ForCausalLM has RecurrentState: leave out spec"
    with pytest.raises(ValueError, match=text):
        LLM(tmp_path, **{**SIZES, "speculative_config": drafts})
