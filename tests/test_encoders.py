"""Encoders against transformers: hidden states and classes of texts, whatever is beside them."""

import itertools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrunner import pytree
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.pooling.params import PoolerConfig, PoolingParams
from jaxrunner.pooling.reading import read_pooling
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from tests.support import pooling, tiny
from tests.support.lowering import cuda, lowers
from tests.support.pooling import PROMPTS

EVERY = {"pooling_type": "ALL"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "Roberta" in name else name
        for name in (*pooling.ENCODERS, "BertForMaskedLM", "RobertaForMaskedLM")
    ],
)
def test_every_token_sees_its_whole_text_and_no_other(tmp_path, name):
    module = pooling.save(tmp_path, name).base_model
    with pooling.start(tmp_path, **pooling.WHOLE, pooler_config=EVERY) as llm:
        outputs = llm.encode(pooling.prompts(PROMPTS))
        assert llm.memory_plan.kv == 0
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.unit(pooling.hidden(module, ids))
        np.testing.assert_allclose(output.outputs.data, want, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification",
        pytest.param("RobertaForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("ModernBertForSequenceClassification", marks=pytest.mark.slow),
        pytest.param("ModernBertForTokenClassification", marks=pytest.mark.slow),
        pytest.param("BertForTokenClassification", marks=pytest.mark.slow),
    ],
)
def test_classes_of_texts(tmp_path, name):
    module = pooling.save(tmp_path, name, num_labels=3)
    theirs = [pooling.scores(module, ids) for ids in PROMPTS]
    exact = [pooling.scores(module.double(), ids) for ids in PROMPTS]
    # transformers' own float32 is up to 1.4e-5 from float64
    error = max(abs(a - b).max() for a, b in zip(theirs, exact, strict=True))
    with pooling.start(tmp_path, **pooling.WHOLE) as llm:
        outputs = llm.encode(pooling.prompts(PROMPTS), PoolingParams(use_activation=False))
    for want, output in zip(exact, outputs, strict=True):
        np.testing.assert_allclose(output.outputs.data, want, rtol=1e-5, atol=max(1e-5, 3 * error))


def test_a_cross_encoder_reads_both_texts_of_a_pair(tmp_path):
    """The tokenizer separates them, and tokens of the second are of the other type."""
    module = pooling.save(tmp_path, "BertForSequenceClassification", num_labels=1)
    tokenizer = pooling.tokenizer()
    with pooling.start(
        tmp_path, **pooling.WHOLE, skip_tokenizer_init=False, tokenizer=tokenizer
    ) as llm:
        outputs = llm.score("abc", ["de", "f a"])
        raw = PoolingParams(use_activation=False)
        (swapped,) = llm.score(["de"], ["abc"], pooling_params=raw)
        cuts = [
            llm.score("abc", "de", pooling_params=raw, truncate_prompt_tokens=k)[0] for k in (7, 2)
        ]
    for second, output in zip(["de", "f a"], outputs, strict=True):
        found = tokenizer.inner.encode("abc", second)
        types = torch_ids(found.type_ids)
        (want,) = pooling.scores(module, found.ids, token_type_ids=types)
        assert output.prompt_token_ids == found.ids and 1 in found.type_ids
        np.testing.assert_allclose(output.outputs.score, 1 / (1 + np.exp(-want)), atol=1e-5)
    found = tokenizer.inner.encode("de", "abc")
    (want,) = pooling.scores(module, found.ids, token_type_ids=torch_ids(found.type_ids))
    np.testing.assert_allclose(swapped.outputs.score, want, rtol=1e-5, atol=1e-5)
    found = tokenizer.inner.encode("abc", "de")
    for k, kinds, cut in zip((7, 2), ({0, 1}, {1}), cuts, strict=True):
        ids, types = found.ids[-k:], found.type_ids[-k:]
        (want,) = pooling.scores(module, ids, token_type_ids=torch_ids(types))
        assert cut.prompt_token_ids == ids and set(types) == kinds and len(found.ids) > k
        np.testing.assert_allclose(cut.outputs.score, want, rtol=1e-5, atol=1e-5)


def torch_ids(ids):
    import torch

    return torch.tensor([ids])


def write_modules(folder, modules, **files):
    """Writes modules.json, and a config.json in the folder of each module that has one."""
    types = [dict(idx=i, name=str(i), path=at, type=f"a.b.{kind}") for i, (kind, at) in modules]
    (folder / "modules.json").write_text(json.dumps(types))
    for at, config in files.items():
        (folder / at).mkdir(exist_ok=True)
        (folder / at / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "widths", "activation"),
    [("BertModel", [36, 10], "Tanh"), ("Gemma3TextModel", [36, 50, 20], "Identity")],
    ids=["a layer with a bias", "two layers, as of EmbeddingGemma"],
)
def test_sentence_transformers_files_say_what_comes_behind_the_model(
    tmp_path, name, widths, activation
):
    module, has_bias = pooling.save(tmp_path, name), activation == "Tanh"
    files: dict[str, Any] = dict(pool=dict(pooling_mode_mean_tokens=True))
    layers, draw = [], np.random.default_rng(0).normal
    for i, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        files[f"dense_{i}"] = dict(in_features=inputs, out_features=outputs, bias=has_bias,
                                   activation_function=f"torch.nn.{activation}")  # fmt: skip
        weight = draw(size=(outputs, inputs)).astype(np.float32)
        layers.append((weight, has_bias * draw(size=outputs).astype(np.float32)))
    kinds = ["Pooling", *["Dense"] * len(layers), "Normalize"]
    modules = [("Transformer", ""), *zip(kinds, [*files, "norm"], strict=True)]
    write_modules(tmp_path, enumerate(modules), **files)
    for i, (weight, bias) in enumerate(layers):
        tensors = {"linear.weight": weight} | ({"linear.bias": bias} if has_bias else {})
        safetensors.numpy.save_file(tensors, tmp_path / f"dense_{i}" / "model.safetensors")
    with pooling.start(tmp_path, **pooling.WHOLE) as llm:
        outputs = llm.embed(pooling.prompts(PROMPTS))
        a, b = (np.array(output.outputs.embedding) for output in outputs[2:4])
    for ids, output in zip(PROMPTS, outputs, strict=True):
        want = pooling.hidden(module, ids).mean(0)
        for weight, bias in layers:
            want = weight @ want + bias
        want = np.tanh(want) if has_bias else want
        np.testing.assert_allclose(output.outputs.embedding, pooling.unit(want), atol=1e-5)
    assert abs(a @ b) < 0.999


GOOGLES = dict(directionality="bidi", pooler_fc_size=768, pooler_num_attention_heads=12,
               pooler_num_fc_layers=3, pooler_size_per_head=128,
               pooler_type="first_token_transform")  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {  # keys beside those that transformers writes today
    "BertModel": GOOGLES | dict(
        position_embedding_type="absolute", gradient_checkpointing=False, output_past=True,
        model_name="a name", torch_dtype="float32", use_cache=True),
    "BertForSequenceClassification": dict(
        position_embedding_type="absolute", classifier_dropout=None, sentence_transformers=dict(
            activation_fn="torch.nn.modules.activation.Sigmoid", version="4.1.0")),
    "XLMRobertaModel": dict(
        output_past=True, position_embedding_type="absolute", classifier_dropout=None),
    "XLMRobertaForSequenceClassification": dict(
        output_past=True, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity"),
    "RobertaModel": dict(position_embedding_type="absolute", gradient_checkpointing=False),
    "ModernBertModel": dict(
        position_embedding_type="absolute", reference_compile=False, layer_norm_eps=1e-5,
        repad_logits_with_grad=False, sparse_pred_ignore_index=-100, sparse_prediction=False,
        deterministic_flash_attn=False, mlp_dropout=0.0, gradient_checkpointing=False),
    "Gemma3TextModel": dict(
        _sliding_window_pattern=6, attn_logit_softcapping=None, rope_scaling=None,
        rope_local_base_freq=10000.0, rope_theta=1000000.0, rope_parameters=None),
}  # fmt: skip


def read(values: dict[str, Any]) -> Any:
    """Returns the config of a model that pools, given the keys of its config.json."""
    found = read_pooling("auto", values, Path(), PoolerConfig())
    assert found is not None
    return found.made(*read_model(Settings(found.settings)))[1]


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_of_published_configs_change_nothing(name):
    values = pooling.settings(name)
    want, got = read(values), read(values | PUBLISHED[name])
    assert got.base == want.base and got.layers == want.layers and got.pooling == want.pooling


def test_old_cross_encoders_name_their_activation():
    name = "XLMRobertaForSequenceClassification"
    values = pooling.settings(name, num_labels=1)
    assert read(values).activation == "sigmoid"
    assert read(values | PUBLISHED[name]).activation == "identity"


def test_positions_that_modernbert_does_not_have_are_refused():
    values = pooling.settings("ModernBertModel") | dict(position_embedding_type="relative_key")
    with pytest.raises(ValueError, match="position_embedding_type='relative_key' is not supported"):
        read(values)


SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, head_dim=64, max_position_embeddings=64,
)  # fmt: skip


@lowers
@pytest.mark.parametrize(
    "name, attention",
    [("Qwen3ForCausalLM", "prefill_attention"), ("BertModel", "")],
    ids=["a decoder", "an encoder"],
)
def test_a_model_that_pools_lowers_for_a_gpu(name, attention):
    """A decoder through its kernels; attention both ways is plain JAX."""
    values = SIZES | dict(architectures=[name])
    found = read_pooling("pooling", values, Path(), PoolerConfig())
    assert found is not None
    model, config = found.made(*read_model(Settings(found.settings)))
    engine = tiny.engine_config(block_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(model, config, engine, backends.fused, RULES)
    with cuda():
        told = operations(program, params, Key("step", Bucket(64, 4)))
    names = {one.operation: one.name for one in told}
    assert names.get("attention", "") == attention and "linear" in names
