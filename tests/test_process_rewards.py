"""Process reward models: scores of tokens, and of those that end steps of reasoning."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxrunner.pooling.activations import softmax
from jaxrunner.pooling.params import PoolerConfig, PoolingParams
from tests.support import pooling
from tests.support.pooling import PROMPTS

TAG = 7
TEXTS = [[*ids[:3], TAG, *ids[3:], TAG] for ids in PROMPTS]  # two steps each


def save(folder, architecture, num_labels):
    """Writes a Qwen2 with two layers behind every token. Returns what scores a text."""
    module = pooling.save(folder, "Qwen2Model")
    file = folder / "model.safetensors"
    draw, own = np.random.default_rng(0).normal, {}
    for name, shape in {"0": (36, 36), "2": (num_labels, 36)}.items():
        # Of the size that trained layers have: rewards of a few units.
        own[f"score.{name}.weight"] = draw(size=shape, scale=0.1).astype(np.float32)
        own[f"score.{name}.bias"] = draw(size=shape[0]).astype(np.float32)
    safetensors.numpy.save_file(safetensors.numpy.load_file(file) | own, file)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(config))
    module = module.double()

    def scores(ids: list[int]) -> np.ndarray:
        x = pooling.hidden(module, ids) @ own["score.0.weight"].T + own["score.0.bias"]
        return np.maximum(x, 0) @ own["score.2.weight"].T + own["score.2.bias"]

    return scores


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory):
    """Returns the folder of a checkpoint, and what scores a text."""
    folder = tmp_path_factory.mktemp("qwen2")
    return folder, save(folder, "Qwen2ForProcessRewardModel", 2)


@pytest.mark.parametrize(
    "architecture, num_labels", [("Qwen2ForProcessRewardModel", 2), ("Qwen2ForRewardModel", 1)]
)
def test_rewards_of_each_token(tmp_path, architecture, num_labels):
    scores = save(tmp_path, architecture, num_labels)
    with pooling.start(tmp_path) as llm:
        outputs = llm.reward(pooling.prompts(PROMPTS))
        assert llm.get_supported_tasks() == ("token_classify",)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, scores(ids), rtol=1e-5, atol=1e-5)


def test_rewards_of_steps_are_those_of_their_last_tokens(rewarding):
    """A request may name another token, and which of the scores of a token it wants."""
    folder, scores = rewarding
    with pooling.start(folder, pooler_config=dict(step_tag_id=TAG)) as llm:
        told = llm.encode(pooling.prompts(TEXTS))
        other = PoolingParams(step_tag_id=TEXTS[-1][1], returned_token_ids=[1])
        (one,) = llm.reward(pooling.prompts(TEXTS[-1:]), pooling_params=other)
        for wrong, words in (
            (PoolingParams(step_tag_id=62), "step_tag_id=62 must be a token of the 62 there are"),
            (
                PoolingParams(returned_token_ids=[2]),
                r"returned_token_ids=\(2,\) must be among the 2",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                llm.reward(pooling.prompts(TEXTS[:1]), pooling_params=wrong)
    for ids, output in zip(TEXTS, told, strict=True):
        want = softmax(scores(ids))[np.array(ids) == TAG]
        assert len(want) >= 2
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-5)
    want = softmax(scores(TEXTS[-1])[:, 1:])[np.array(TEXTS[-1]) == TEXTS[-1][1]]
    np.testing.assert_allclose(one.outputs.data, want, atol=1e-5)


def test_a_model_that_writes_tokens_scores_steps_by_their_logits(tmp_path):
    """As Math-Shepherd: how likely "+" is beside "-", where a step ends."""
    module = pooling.save(tmp_path, "MistralForCausalLM").double()
    good, bad = 30, 12
    asked = PoolerConfig(
        pooling_type="STEP", step_tag_id=TAG, returned_token_ids=[good, bad], normalize=True
    )
    with pooling.start(tmp_path, runner="pooling", pooler_config=asked) as llm:
        outputs = llm.encode(pooling.prompts(TEXTS))
        assert llm.get_supported_tasks() == ("token_classify",)
    for ids, output in zip(TEXTS, outputs, strict=True):
        logits = pooling.scores(module, ids)[:, [good, bad]]
        want = softmax(logits)[np.array(ids) == TAG]
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-5)
    with pytest.raises(ValueError, match="'STEP' of MistralForCausalLM wants returned_token_ids,"):
        pooling.start(tmp_path, runner="pooling", pooler_config=dict(pooling_type="STEP"))


def test_what_is_pooled_is_normed_as_the_config_says(tmp_path):
    module = pooling.save(tmp_path, "Qwen2Model")
    with pooling.start(tmp_path, pooler_config=PoolerConfig(normalize=False)) as llm:
        outputs = llm.embed(pooling.prompts(PROMPTS))
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.hidden(module, ids)[-1]
        np.testing.assert_allclose(output.outputs.embedding, want, rtol=1e-5, atol=1e-5)
