"""Adapters of models that pool: arrays are those of the model merged with each."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import LoRARequest, PoolingParams
from tests.support import lora, pooling
from tests.support.pooling import PROMPTS

CONFIG = dict(peft_type="LORA", r=3, lora_alpha=6)
SIZES: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=8)
RAW = PoolingParams(use_activation=False)


def adapters(module: Any, **kwargs: Any) -> list[tuple[LoRARequest, dict[str, np.ndarray]]]:
    """Returns two adapters, with their tensors."""
    made = [(i, lora.of_module(module, i, **kwargs)) for i in (1, 2)]
    return [(LoRARequest(f"{i}", i, lora_tensors=t, lora_config=CONFIG), t) for i, t in made]


def test_embeddings_are_those_of_merged_models(tmp_path):
    """Prompts of two adapters and of none share steps, in chunks and from cached prefixes."""
    module = pooling.save(tmp_path, "Qwen3Model")
    (one, tensors), (other, _) = adapters(module)
    asked: list[Any] = [None, one, other, None, one]
    with pooling.start(tmp_path, **SIZES) as llm:
        alone = llm.embed(pooling.prompts(PROMPTS))
        mixed = llm.embed(pooling.prompts(PROMPTS), lora_request=asked)
        again = llm.embed(pooling.prompts(PROMPTS), lora_request=asked)
        of_other = llm.embed(pooling.prompts(PROMPTS[2:3]), lora_request=other)
        llm.merge_lora(1)
        merged = llm.embed(pooling.prompts(PROMPTS[1:2]))
        llm.unmerge_lora()
        assert again[-1].num_cached_tokens >= 32 and not mixed[-1].num_cached_tokens
        with pytest.raises(ValueError, match="lora_request must be one, or one for each of 5 pr"):
            llm.embed(pooling.prompts(PROMPTS), lora_request=[one])
    told = [
        [np.array(o.outputs.embedding) for o in of]
        for of in (alone, mixed, again, of_other, merged)
    ]
    for i, ids in enumerate(PROMPTS):
        want = pooling.unit(pooling.hidden(module, ids)[-1])
        np.testing.assert_allclose(told[0][i], want, atol=1e-5)
        if asked[i] is None:
            np.testing.assert_allclose(told[1][i], want, atol=1e-5)
        np.testing.assert_allclose(told[2][i], told[1][i], atol=1e-5)
    lora.merge_into(module, tensors, CONFIG)
    for i in (1, 4):
        want = pooling.unit(pooling.hidden(module, PROMPTS[i])[-1])
        np.testing.assert_allclose(told[1][i], want, atol=1e-5)
        assert np.abs(want - told[0][i]).max() > 0.01
    np.testing.assert_allclose(told[3][0], told[1][2], atol=1e-5)
    np.testing.assert_allclose(told[4][0], told[1][1], atol=1e-5)


def test_scores_of_pairs_are_those_of_merged_models(tmp_path):
    """Of an encoder; the layers behind its pooling have no adapters."""
    module = pooling.save(tmp_path, "BertForSequenceClassification", num_labels=1)
    (one, tensors), _ = adapters(module, without=("classifier", "pooler.dense"))
    tokenizer = pooling.tokenizer()
    sizes = dict(skip_tokenizer_init=False, tokenizer=tokenizer)
    with pooling.start(tmp_path, **pooling.WHOLE, **SIZES, **sizes) as llm:
        pairs = llm.score("abc", ["de", "f a"], pooling_params=RAW, lora_request=[one, None])
        (rewards,) = llm.reward(pooling.prompts(PROMPTS[:1]), lora_request=one)
        (class_,) = llm.classify(pooling.prompts(PROMPTS[:1]), lora_request=one)
        (array,) = llm.encode(pooling.prompts(PROMPTS[:1]), RAW, lora_request=one)
        whole = lora.of_module(module, 1)
        with pytest.raises(ValueError, match=r"changes .*classifier.* no products of a layer"):
            llm.add_lora(LoRARequest("whole", 3, lora_tensors=whole, lora_config=CONFIG))

    def want(text: str) -> np.ndarray:
        import torch

        found = tokenizer.inner.encode("abc", text)
        return pooling.scores(module, found.ids, token_type_ids=torch.tensor([found.type_ids]))

    base = want("de")
    np.testing.assert_allclose(pairs[1].outputs.score, want("f a"), rtol=1e-5, atol=1e-5)
    lora.merge_into(module, tensors, CONFIG)
    np.testing.assert_allclose(pairs[0].outputs.score, want("de"), rtol=1e-5, atol=1e-5)
    assert np.abs(want("de") - base) > 0.01
    merged = pooling.scores(module, PROMPTS[0])
    np.testing.assert_allclose(rewards.outputs.data, merged, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(array.outputs.data, merged, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(class_.outputs.probs, 1 / (1 + np.exp(-merged)), atol=1e-5)


def test_cosines_are_of_texts_with_one_adapter(tmp_path):
    module = pooling.save(tmp_path, "Qwen3Model")
    (one, _), (other, _) = adapters(module)
    sizes = dict(skip_tokenizer_init=False, tokenizer=pooling.tokenizer())
    with pooling.start(tmp_path, **SIZES, **sizes) as llm:
        mixed = llm.score("ab", ["cd", "cd", "ef"], lora_request=[one, other, one])
        for i, (text, adapter) in enumerate([("cd", one), ("cd", other), ("ef", one)]):
            a, b = llm.embed(["ab", text], lora_request=adapter)
            cosine = np.dot(a.outputs.embedding, b.outputs.embedding)
            np.testing.assert_allclose(mixed[i].outputs.score, cosine, atol=1e-5)
    assert abs(mixed[0].outputs.score - mixed[1].outputs.score) > 0.01
