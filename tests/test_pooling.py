"""Decoders that pool, against transformers: embeddings, classes, scores and rewards."""

import numpy as np
import pytest

from jaxrunner.pooling.params import PoolerConfig, PoolingParams
from tests.support import pooling
from tests.support.pooling import PROMPTS


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    module = pooling.save(folder, "Qwen3Model")
    options = dict(skip_tokenizer_init=False, tokenizer=pooling.tokenizer())
    with pooling.start(folder, **options) as llm:
        yield module, llm, folder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    module = pooling.save(folder, "LlamaForSequenceClassification", num_labels=4, pad_token_id=0)
    with pooling.start(folder) as llm:
        yield module, llm


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def test_embeddings_are_those_of_transformers(embedder):
    module, llm, _ = embedder
    outputs = llm.embed(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.unit(pooling.hidden(module, ids)[-1])
        np.testing.assert_allclose(output.outputs.embedding, want, atol=1e-5)
        assert output.prompt_token_ids == ids and output.outputs.hidden_size == want.size
    again = llm.embed(pooling.prompts(PROMPTS))  # of prefixes that are cached
    assert again[-1].num_cached_tokens >= 32
    for one, other in zip(outputs, again, strict=True):
        np.testing.assert_allclose(one.outputs.embedding, other.outputs.embedding, atol=1e-5)


def test_an_embedding_is_cut_before_it_is_normed(embedder):
    module, llm, _ = embedder
    each = [PoolingParams(dimensions=7), PoolingParams(normalize=False)]
    cut, plain = llm.embed(pooling.prompts(PROMPTS[1:3]), pooling_params=each)
    first, second = (pooling.hidden(module, ids)[-1] for ids in PROMPTS[1:3])
    np.testing.assert_allclose(cut.outputs.embedding, pooling.unit(first[:7]), atol=1e-5)
    np.testing.assert_allclose(plain.outputs.embedding, second, rtol=1e-5, atol=1e-5)


def test_the_last_tokens_of_a_prompt_that_is_cut(embedder):
    module, llm, _ = embedder
    (output,) = llm.embed(pooling.prompts([PROMPTS[4]]), truncate_prompt_tokens=9)
    want = pooling.unit(pooling.hidden(module, PROMPTS[4][-9:])[-1])
    np.testing.assert_allclose(output.outputs.embedding, want, atol=1e-5)


def test_the_score_of_a_pair_is_the_cosine_of_its_texts(embedder):
    module, llm, _ = embedder
    texts, encode = ["abc", "de", "f a"], pooling.tokenizer().encode
    one, *others = (pooling.unit(pooling.hidden(module, encode(text))[-1]) for text in texts)
    scores = [output.outputs.score for output in llm.score(texts[0], texts[1:])]
    np.testing.assert_allclose(scores, [one @ other for other in others], atol=1e-5)


@pytest.mark.parametrize("kind", ["MEAN", pytest.param("CLS", marks=pytest.mark.slow), "ALL"])
def test_what_is_pooled_of_chunks_is_that_of_the_prompt(embedder, kind):
    module, _, folder = embedder
    with pooling.start(folder, pooler_config=PoolerConfig(pooling_type=kind)) as llm:
        llm.encode(pooling.prompts(PROMPTS))  # whose prefixes are cached
        outputs = llm.encode(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        states = pooling.hidden(module, ids)
        want = dict(MEAN=states.mean(0), CLS=states[0], ALL=states)[kind]
        np.testing.assert_allclose(output.outputs.data, pooling.unit(want), atol=1e-5)


def test_classes_are_those_of_transformers(classifier):
    module, llm = classifier
    prompts = pooling.prompts(PROMPTS)
    outputs, raw = llm.classify(prompts), llm.reward(prompts)
    for ids, output, scores in zip(PROMPTS, outputs, raw, strict=True):
        want = pooling.scores(module, ids)
        np.testing.assert_allclose(output.outputs.probs, softmax(want), atol=1e-5)
        np.testing.assert_allclose(scores.outputs.data, want, rtol=1e-5, atol=1e-5)
        assert output.outputs.num_classes == 4


def test_a_reranker_scores_by_two_of_its_tokens(tmp_path):
    """What the logit of one has over that of the other, as a probability of two."""
    module = pooling.save(tmp_path, "Qwen3ForCausalLM", tie_word_embeddings=False)
    asked = dict(architectures=["Qwen3ForSequenceClassification"], classifier_from_token=[7, 30])
    with pooling.start(tmp_path, hf_overrides=asked) as llm:
        outputs = llm.classify(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        no, yes = pooling.scores(module, ids)[-1, [7, 30]]
        np.testing.assert_allclose(output.outputs.probs, [1 / (1 + np.exp(no - yes))], atol=1e-5)
    with pytest.raises(ValueError, match="classifier_from_token must list two tokens of the voca"):
        pooling.start(tmp_path, hf_overrides=asked | dict(classifier_from_token=[62, 1]))
