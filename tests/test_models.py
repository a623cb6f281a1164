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
NEW_TOKENS = 64
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


def generate(engine, params):
    requests = [engine.add(f"{i}", prompt, params) for i, prompt in enumerate(PROMPTS)]
    while engine.has_unfinished:
        engine.step()
    return requests


QUICK = "llama", "llama, dynamic rope", "mistral", "qwen2, some windows", "qwen3"


# The others differ from these in weights and angles alone, which their logits show.
SLOW = "llama, tied", "llama, one key", "mimo", "mistral, no window"


@pytest.mark.parametrize(
    "variant", [*QUICK, *(pytest.param(variant, marks=pytest.mark.slow) for variant in SLOW)]
)
def test_greedy_tokens_equal_those_of_transformers(variant, huggingface):
    model, config, params = families.model_and_params(variant)
    sizes: dict[str, Any] = dict(max_model_len=128, num_blocks=400, block_size=8, max_num_seqs=16,
                 max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,))  # fmt: skip
    engine = Engine(model, config, EngineConfig(**sizes), params)
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    first = generate(engine, greedy)
    requests = generate(engine, greedy)  # most of each prompt is found in the prefix cache
    assert [r.output_token_ids for r in first] == [r.output_token_ids for r in requests]
    assert requests[-1].num_cached_tokens > 40
    reference = huggingface.model(variant)
    for i, request in enumerate(requests):
        prompt, output = request.prompt_token_ids, request.output_token_ids
        assert len(output) == NEW_TOKENS
        if i % (3 if "dynamic" in variant else 8) == 2:
            assert output == huggingface.greedy(reference, prompt, NEW_TOKENS)
        if "dynamic" in variant:
            continue  # whose angles change with the length
        # Each token is the likeliest one after those before it: by induction, what generate gives.
        logits = huggingface.logits(reference, prompt + output)
        assert output == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("variant", families.VARIANTS)
def test_logits_match_transformers(variant, huggingface):
    _, config, params = families.model_and_params(variant)
    ids = families.ids(100, seed=1)
    reference = huggingface.model(variant)
    got, want = tiny.dense_logits(config, params, ids), huggingface.logits(reference, ids)
    np.testing.assert_allclose(got, want, atol=1e-4)
