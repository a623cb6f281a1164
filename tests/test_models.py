"""Every family and variant against Hugging Face transformers, token for token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig
from jaxrunner.engine.engine import Engine
from tests.support import families, tiny

GOLDEN = np.load(Path(__file__).parent / "data" / "golden.npz")
NEW_TOKENS = 40
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 23, 31, 33, 40, 51, 60)
PROMPTS = [families.ids(n, seed=n) for n in LENGTHS]


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_match_stored_ones(variant):
    _, config, params = families.model_and_params(variant)
    want = GOLDEN[variant]
    got = tiny.dense_logits(config, params, families.ids(40))[-len(want) :]
    np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.fixture(scope="module")
def huggingface():
    pytest.importorskip("torch", reason="the reference needs PyTorch: install the hf extra")
    pytest.importorskip("transformers", reason="the reference needs transformers")
    from tests.support import huggingface

    return huggingface


def greedy(variant: str) -> list[list[int]]:
    """Returns what all prompts at once are answered, the same with cached prefixes."""
    model, config, params = families.model_and_params(variant)
    sizes: dict[str, Any] = dict(max_model_len=128, num_blocks=400, block_size=8, max_num_seqs=16,
                 max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,))  # fmt: skip
    engine, outputs = Engine(model, config, EngineConfig(**sizes), params), []
    for num_cached in (0, 56):
        rule = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
        requests = [engine.add(f"{i}", prompt, rule) for i, prompt in enumerate(PROMPTS)]
        while engine.has_unfinished:
            engine.step()
        assert requests[-1].num_cached_tokens == num_cached
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    return outputs[0]


# The others differ from these in weights and angles alone, which their logits show.
@pytest.mark.parametrize(
    "variant",
    [
        "llama", "qwen2, some windows", pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("qwen3", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_greedy_tokens_equal_those_of_transformers(variant, huggingface):
    """Each is the likeliest one after those before it: by induction, what its `generate` gives."""
    outputs = greedy(variant)
    rows = [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]
    padded = [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]  # no token sees these
    reference = huggingface.model(variant)
    logits = reference(huggingface.torch.tensor(padded)).logits
    likeliest = logits.detach().numpy().argmax(-1)
    for prompt, output, after in zip(PROMPTS, outputs, likeliest, strict=True):
        assert len(output) == NEW_TOKENS
        assert output == after[len(prompt) - 1 :][:NEW_TOKENS].tolist()


def test_angles_that_change_with_the_length_are_those_of_transformers(huggingface):
    outputs = greedy("llama, dynamic rope")
    reference = huggingface.model("llama, dynamic rope")
    for i in (2, 11, 14):  # of 3 tokens, 31 and 51; the angles change from 33 on
        assert outputs[i] == huggingface.greedy(reference, PROMPTS[i], NEW_TOKENS)


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_match_transformers(variant, huggingface):
    _, config, params = families.model_and_params(variant)
    ids = families.ids(64, seed=1)  # more than the lengths from which scaled angles change
    reference = huggingface.model(variant)
    got, want = tiny.dense_logits(config, params, ids), huggingface.logits(reference, ids)
    np.testing.assert_allclose(got, want, atol=1e-4)
