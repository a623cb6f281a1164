"""What cannot be pooled is refused by name, before anything is computed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.pooling import sentence_transformers
from jaxrunner.pooling.pairs import paired, read_pairs
from jaxrunner.pooling.params import PoolerConfig, PoolingParams
from jaxrunner.pooling.reading import read_pooling
from tests.support import pooling, small_llm

BERT = dict(
    architectures=["BertModel"], vocab_size=62, hidden_size=36, num_hidden_layers=1,
    num_attention_heads=6, intermediate_size=44, max_position_embeddings=64,
)  # fmt: skip
WHOLE: dict[str, Any] = pooling.ENGINE | pooling.WHOLE | dict(load_format="dummy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("bert")
    (at / "config.json").write_text(json.dumps(BERT))
    return at


@pytest.fixture(scope="module")
def embedder(folder):
    with LLM(str(folder), **WHOLE) as llm:
        yield llm


@pytest.fixture(scope="module")
def classifier(folder):
    changes = dict(architectures=["BertForSequenceClassification"], num_labels=3)
    with LLM(str(folder), hf_overrides=changes, **WHOLE) as llm:
        yield llm


@pytest.mark.parametrize(
    "call, kind, words",
    [
        (lambda llm: llm.classify("a"), ValueError, "wants a model for classify, this one is"),
        (lambda llm: llm.reward("a"), ValueError, "for classify or token_classify, this one is"),
        (lambda llm: llm.encode("a", 3), TypeError, "pooling_params must be PoolingParams, got 3"),
        (lambda llm: llm.encode("a", {}), TypeError, "pooling_params must be PoolingParams, got"),
        (lambda llm: llm.encode(3), TypeError, "prompts must be a str, .* got 3 of int"),
        (lambda llm: llm.embed([("a", 3)]), TypeError, "prompt"),
        (lambda llm: llm.score("a", "b", pooling_params=0), TypeError, "pooling_params must be"),
        (lambda llm: llm.encode("a", pooling_task="classify"), ValueError,
         "pooling_task='classify' is not what this LLM was made for, which is 'embed'"),
        (lambda llm: llm.encode("a", PoolingParams(task="classify")), ValueError,
         "PoolingParams.task='classify' is not what this LLM was made for"),
        (lambda llm: llm.embed("a", pooling_params=PoolingParams(dimensions=37)), ValueError,
         "dimensions=37 must be at most the 36 of an embedding"),
        (lambda llm: llm.encode(["a", "b"], [PoolingParams()]), ValueError,
         "pooling_params must be one, or one for each of 2 prompts, got 1"),
        (lambda llm: llm.embed(pooling.prompts([[1] * 49])), ValueError, "prompt has 49 tokens"),
        (lambda llm: llm.embed(pooling.prompts([[1, 62]])), ValueError, "is out of range"),
        (lambda llm: llm.generate(pooling.prompts([[1]]), SamplingParams(), on_error="raise"),
         ValueError, "BertModel pools and generates no tokens: call embed"),
        (lambda llm: llm.embed("a", lora_request=3), TypeError,
         "lora_request must be a LoRARequest or None, got 3"),
        (lambda llm: llm.encode("a", PoolingParams(step_tag_id=3)), ValueError,
         "step_tag_id=3 is of pooling_type='STEP', which this LLM was not made with: leave it"),
        (lambda llm: llm.score("a", ["b", 3]), TypeError, "data_2 must be a text or a list of tex"),
    ],
)  # fmt: skip
def test_what_a_model_was_not_made_for(embedder, call, kind, words):
    with pytest.raises(kind, match=words):
        call(embedder)
    assert len(embedder.embed(pooling.prompts([[1, 2]]))[0].outputs.embedding) == 36


def test_scores_are_of_one_class(classifier):
    with pytest.raises(
        ValueError, match=r"score wants a model with one class, this one has 3: cal"
    ):
        classifier.score("a", "b")
    with pytest.raises(
        ValueError, match=r"LLM.embed wants a model for embed, this one is for clas"
    ):
        classifier.embed("a")


def test_a_model_that_generates_does_not_pool():
    with (
        LLM(str(embedded.PATH), **small_llm.SIZES) as llm,
        pytest.raises(
            ValueError, match=r"LLM.embed wants a model that pools, this one generates: "
        ),
    ):
        llm.embed("a")


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(runner="draft"), "runner must be one of .*, got 'draft'"),
        (dict(runner="generate"), "runner='generate' has no use for architectures=.'BertModel'"),
        (dict(pooler_config={"x": 1, 2.5: 1}), "pooler_config has .'x', 2.5., it may have task, "),
        (dict(pooler_config=dict(task="x")), "pooler_config: task must be one of .*, got .x."),
        (dict(pooler_config=dict(dimensions=37)), "dimensions=37 must be at most the 36 of an emb"),
        (dict(pooler_config=dict(dimensions=7), hf_overrides=dict(matryoshka_dimensions=[4, 8])),
         "dimensions=7 must be one of matryoshka_dimensions in config.json, .4, 8.: others"),
        (dict(max_num_batched_tokens=47), "max_num_batched_tokens=47 must be at least its 48 tok"),
        (dict(speculative_config=dict(method="ngram", num_speculative_tokens=2)),
         "runner='pooling' drafts no tokens: leave out speculative_config"),
        (dict(pooler_config=dict(task="classify")), "task='classify' wants a model with layers th"),
        (dict(pooler_config=dict(pooling_type="STEP")), "task='token_classify' wants a model with"),
        (dict(pooler_config=dict(step_tag_id=3)), "step_tag_id=3 is of pooling_type='STEP', which"),
    ],
)  # fmt: skip
def test_what_an_encoder_cannot_be_made_with(folder, changes, words):
    with pytest.raises(ValueError, match=words):
        LLM(str(folder), **WHOLE | changes)


@pytest.mark.devices(2)
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_model_that_pools_lies_on_one_device(tmp_path, sizes):
    values = pooling.DECODER | dict(architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=r"runner='pooling' runs a model on one device: leave tens"
    ):
        LLM(str(tmp_path), runner="pooling", load_format="dummy", **pooling.ENGINE | sizes)


@pytest.mark.parametrize("name", [[], {}])
def test_an_architecture_that_is_no_name_is_refused_by_its_key(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(BERT | dict(architectures=[name])))
    with pytest.raises(ValueError, match=r"config\.json: architectures\[0\] must be str, got "):
        LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True)


def test_an_encoder_has_steps_for_its_longest_text(folder):
    sizes: dict[str, Any] = dict(max_num_seqs=3, warm_up=False, cache_dir=None, use_tqdm=False)
    changes = dict(max_position_embeddings=9000)
    with LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, hf_overrides=changes, **sizes
    ) as llm:
        assert llm.engine.config.max_num_batched_tokens == 9000


def test_what_has_no_use_but_to_generate_is_not_pooled():
    values = dict(architectures=["Qwen3ForCausalLM"])
    with pytest.raises(ValueError, match=r"pooler_config is for models that pool, and 'Qwen3ForC"):
        read_pooling("auto", values, Path(), PoolerConfig(pooling_type="LAST"))
    with pytest.raises(ValueError, match=r"runner='pooling' has no use for architectures=None: m"):
        read_pooling("pooling", {}, Path(), PoolerConfig())
    found = read_pooling("pooling", values, Path(), PoolerConfig())
    assert found is not None and found.task == "embed" and found.settings["tie_word_embeddings"]


@pytest.mark.parametrize(
    "make, kind, words",
    [
        (lambda: PoolingParams(task="sing"), ValueError, "task must be one of .*, got 'sing'"),
        (lambda: PoolingParams(dimensions=0), ValueError, "dimensions=0 is out of range"),
        (lambda: PoolingParams(truncate_prompt_tokens=0), ValueError, "=0 would leave no prompt:"),
        (lambda: PoolingParams(normalize=True, use_activation=False), ValueError,
         "normalize=True and use_activation=False say the opposite of each other"),
        (lambda: PoolerConfig(pooling_type="MAX"), ValueError, "pooling_type must be one of .*M"),
        (lambda: PoolerConfig(task="embed", pooling_type="ALL"), ValueError,
         "task='embed' and pooling_type='ALL' contradict each other: arrays of tokens go"),
        (lambda: PoolerConfig(task="token_embed", pooling_type="STEP"), ValueError,
         "task='token_embed' and pooling_type='STEP' contradict .*, scores of steps with 'STEP'"),
        (lambda: PoolerConfig(normalize=True, use_activation=False), ValueError,
         "normalize=True and use_activation=False say the opposite of each other"),
        (lambda: PoolerConfig.read([1]), TypeError, "pooler_config must be a PoolerConfig or a d"),
        (lambda: PoolerConfig.read({"dim": 1}), ValueError, "pooler_config has .'dim'., it may"),
        (lambda: read_pairs(["a", "b"], ["c"] * 3), ValueError, "data_1 has 2 texts and data_2 3:"),
        (lambda: paired(None, "a", "b", as_pair=True), ValueError, "score reads texts, and skip_t"),
        (lambda: read_model(Settings(BERT | dict(architectures=["Gemma3TextModel"]))), ValueError,
         "use_bidirectional_attention must be true in a Gemma3TextModel, got false"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_fields_are_checked_when_they_are_set_and_kept_as_they_are_read():
    params = PoolingParams(dimensions=4)
    for name, value in dict(use_activation="no", truncate_prompt_tokens=0, task="sing").items():
        with pytest.raises((TypeError, ValueError), match=name):
            setattr(params, name, value)
    params.dimensions = 3
    with pytest.raises(AttributeError, match="dimensions cannot be deleted: set it to its default"):
        del params.dimensions
    assert params == PoolingParams(dimensions=3)
    given: Any = (i for i in (np.int64(1), 2))
    assert PoolerConfig(returned_token_ids=given).returned_token_ids == (1, 2)


MAX = dict(pooling_mode_max_tokens=True)
SWISH = dict(in_features=4, out_features=4, activation_function="torch.nn.Mish")


@pytest.mark.parametrize(
    "text, config, words",
    [
        ("{", {}, "must hold a list of modules, got .*: fetch it again"),
        ('[{"type": "a.Pooling", "path": "../b"}]', {}, "must hold a list of modules, each with a"),
        ('[{"type": "a.WordWeights", "path": "b"}]', {}, "a module 'WordWeights' is not served, o"),
        ('[{"type": "a.Pooling", "path": "b"}]', MAX, "pooling_mode must be one of .*'max_tokens'"),
        ('[{"type": "a.Dense", "path": "b"}]', SWISH, "activation_function must be one of .*Mish"),
    ],
)  # fmt: skip
def test_files_of_sentence_transformers_that_are_not_served(tmp_path, text, config, words):
    (tmp_path / "modules.json").write_text(text)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        sentence_transformers.read(tmp_path)


def test_a_dense_layer_without_its_file(folder, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "modules.json").write_text('[{"type": "a.Dense", "path": "b"}]')
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"in_features": 36, "out_features": 4}')
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(FileNotFoundError, match=r"is missing: modules.json names its folder"):
        LLM(str(tmp_path), **pooling.ENGINE | pooling.WHOLE)


def test_a_model_that_gives_no_number_is_told(embedder):
    import jax

    broken = jax.tree.map(lambda x: x * float("nan"), embedder.params)
    whole = jax.tree.map(lambda x: x + 0, embedder.params)
    embedder.update_params(broken)
    with pytest.raises(ValueError, match=r"prompt .* cannot be pooled: the model gave"):
        embedder.embed(pooling.prompts([[1, 2]]))
    embedder.update_params(whole)
