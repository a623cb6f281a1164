"""A head that is not logits and no part of the package: embeddings of prompts, by an `LLM`."""

from typing import Any

import numpy as np

from jaxrunner import register_model
from tests.outside import checkpoint, float64_llama
from tests.outside.pooled import pooled

NAME = "PooledModel"
SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=[NAME])


def test_prompts_have_embeddings(tmp_path):
    """Those of chunked prompts, side by side; the output layer makes logits of them."""
    register_model(NAME, pooled)
    tensors = checkpoint.write(tmp_path, pooled, SETTINGS)
    prompts = checkpoint.prompts(3, 19, 1, 8)
    with checkpoint.start(tmp_path) as llm:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(asked, checkpoint.greedy(2), use_tqdm=False)
        streamed = [
            values
            for update in llm.stream(asked[1], checkpoint.greedy(2))
            for values in (update.outputs[0].heads or {}).get("embedding", [])
        ]
    for ids, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.heads is not None
        embeddings = np.stack(answer.heads["embedding"]).astype(np.float64)
        assert embeddings.shape == (2, SETTINGS["hidden_size"])
        want = float64_llama.logits(tensors, SETTINGS, [*ids, *answer.token_ids[:1]])[-2:]
        np.testing.assert_allclose(embeddings @ tensors["lm_head.weight"].T, want, atol=1e-4)
    assert outputs[1].outputs[0].heads is not None
    np.testing.assert_allclose(streamed, outputs[1].outputs[0].heads["embedding"], atol=1e-5)
