"""Every key of a config.json is honoured, known to be harmless, or refused by name."""

from typing import Any

import pytest

from jaxrunner.caches.cache_group import distinct
from jaxrunner.hf_config import Settings, read_json
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.registry import FAMILIES, read_model
from tests.support.checkpoints import NEEDS_TORCH, TINY, VARIANTS

FAMILY_NAMES = ("Llama", "Mistral", "Qwen2", "Qwen3")
families = pytest.mark.parametrize("family", FAMILY_NAMES)
EVERY = (
    "_name_or_path attention_dropout auto_map chunk_size_feed_forward id2label initializer_range "
    "is_decoder label2id model_type pad_token_id return_dict torchscript transformers_version "
    "use_cache"
).split()


def decoder(values: dict[str, Any]) -> DecoderConfig:
    config = read_model(Settings(values))[1]
    assert isinstance(config, DecoderConfig)
    return config


def read(family="Llama", **changes) -> DecoderConfig:
    """Reads tiny settings of a family; a change to `...` takes the key away."""
    values = TINY | dict(architectures=[f"{family}ForCausalLM"]) | changes
    return decoder({k: v for k, v in values.items() if v is not ...})


def real(family, **values):
    """Returns what config.json of a published model holds, but for what makes it large."""
    common = dict(
        architectures=[f"{family}ForCausalLM"],
        attention_dropout=0.0,
        hidden_act="silu",
        initializer_range=0.02,
        model_type=family.lower(),
        torch_dtype="bfloat16",
        transformers_version="4.43.0",
        use_cache=True,
    )
    return common | values


LLAMA_3_1_8B = real(
    "Llama", attention_bias=False, bos_token_id=128000, eos_token_id=128001, hidden_size=4096,
    intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False,
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1,
    rms_norm_eps=1e-05, rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position_embeddings=8192, rope_type="llama3"),
)  # fmt: skip
MISTRAL_7B = real(
    "Mistral", bos_token_id=1, eos_token_id=2, hidden_size=4096, intermediate_size=14336,
    max_position_embeddings=32768, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0, sliding_window=4096,
    tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
QWEN2_5_05B = real(
    "Qwen2", bos_token_id=151643, eos_token_id=151643, hidden_size=896, intermediate_size=4864,
    max_position_embeddings=32768, max_window_layers=24, num_attention_heads=14,
    num_hidden_layers=24, num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0,
    sliding_window=32768, tie_word_embeddings=True, use_mrope=False, use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
QWEN3_06B = real(
    "Qwen3", attention_bias=False, bos_token_id=151643, eos_token_id=151645, head_dim=128,
    hidden_size=1024, intermediate_size=3072, max_position_embeddings=40960, max_window_layers=28,
    num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8, rms_norm_eps=1e-06,
    rope_scaling=None, rope_theta=1000000, sliding_window=None, tie_word_embeddings=True,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
# What is read of them: head_dim, first window, biases, norms of query and key, end tokens.
REAL = {
    "Llama-3.1-8B": (LLAMA_3_1_8B, (128, None, False, False, (128001,))),
    "Mistral-7B-v0.1": (MISTRAL_7B, (128, 4096, False, False, (2,))),
    "Qwen2.5-0.5B": (QWEN2_5_05B, (64, None, True, False, (151643,))),
    "Qwen3-0.6B": (QWEN3_06B, (128, None, False, True, (151645,))),
}


@pytest.mark.parametrize(("values", "want"), REAL.values(), ids=REAL.keys())
def test_published_models_are_read(values, want):
    c = decoder(values)
    assert (c.head_dim, c.windows[0], c.qkv_bias, c.qk_norm, c.eos_token_ids) == want
    assert (c.dtype, c.architecture) == ("bfloat16", values["architectures"][0])
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                "rms_norm_eps", "bos_token_id", "tie_word_embeddings"):  # fmt: skip
        assert getattr(c, key) == values[key], key
    assert len(c.windows) == values["num_hidden_layers"]
    assert c.rope.inv_freq[1] == pytest.approx(values["rope_theta"] ** (-2 / c.head_dim), rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_what_transformers_saves_is_read(tmp_path, variant):
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    family, changes = variant
    more = dict(architectures=[f"{family}ForCausalLM"], dtype="float16", bos_token_id=3,
                eos_token_id=[5, 7], rms_norm_eps=3e-5)  # fmt: skip
    hf = getattr(transformers, f"{family}Config")(**TINY | more | changes)
    hf.save_pretrained(tmp_path)
    model, c = read_model(Settings(read_json(tmp_path / "config.json")))
    assert isinstance(c, DecoderConfig)
    assert model is FAMILIES[f"{family}ForCausalLM"]
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                "num_attention_heads", "num_key_value_heads", "max_position_embeddings",
                "rms_norm_eps", "bos_token_id", "tie_word_embeddings"):  # fmt: skip
        assert getattr(c, key) == getattr(hf, key), key
    bias = family == "Qwen2" or getattr(hf, "attention_bias", False)
    assert (c.qkv_bias, c.mlp_bias) == (bias, getattr(hf, "mlp_bias", False))
    assert (c.o_bias, c.qk_norm) == (getattr(hf, "attention_bias", False), family == "Qwen3")
    assert (c.dtype, c.eos_token_ids) == ("float16", (5, 7))
    assert c.windows == (getattr(hf, "sliding_window", None),) * 3


@families
def test_old_and_new_keys_say_the_same(family):
    scaling = dict(factor=3.0)
    old = dict(rope_theta=500.0, rope_scaling=scaling | dict(type="linear"), torch_dtype="float16")
    mid = old | dict(rope_scaling=scaling | dict(rope_type="linear", type="linear"))
    rope = scaling | dict(rope_type="linear", rope_theta=500.0)
    new = dict(rope_parameters=rope, dtype="float16")
    want = read(family, **new)
    assert read(family, **old) == read(family, **mid) == want
    assert want.rope.inv_freq[0] == pytest.approx(1 / 3) and want.dtype == "float16"
    assert read(family, rope_parameters=rope | dict(rope_type="default", factor=None)) != want


HEAD_DIMS = {
    "given": ("Llama", dict(head_dim=10), 10),
    "derived": ("Llama", dict(head_dim=...), 4),
    "null": ("Mistral", dict(head_dim=None), 4),
    "derived by Qwen2": ("Qwen2", dict(head_dim=...), 4),
    "of Qwen3 by default": ("Qwen3", dict(head_dim=...), 128),
}


@pytest.mark.parametrize(("family", "changes", "want"), HEAD_DIMS.values(), ids=HEAD_DIMS.keys())
def test_head_dim_is_given_or_derived(family, changes, want):
    config = read(family, **changes)
    assert config.head_dim == config.dims["D"] == 2 * len(config.rope.inv_freq) == want


WINDOWS = {
    "mistral": ("Mistral", dict(sliding_window=5), (5, 5, 5)),
    "mistral, null": ("Mistral", dict(sliding_window=None), (None,) * 3),
    "mistral, absent": ("Mistral", {}, (4096,) * 3),
    "qwen, unused": ("Qwen2", dict(sliding_window=5, max_window_layers=1), (None,) * 3),
    "qwen, null": ("Qwen2", dict(use_sliding_window=True, sliding_window=None,
                                 max_window_layers=0), (None,) * 3),
    "qwen, upper layers": ("Qwen3", dict(use_sliding_window=True, sliding_window=5,
                                         max_window_layers=1), (None, 5, 5)),
    "qwen, listed": ("Qwen3", dict(
        use_sliding_window=True, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"]), (5, None, 5)),
}  # fmt: skip


@pytest.mark.parametrize(("family", "changes", "want"), WINDOWS.values(), ids=WINDOWS.keys())
def test_each_layer_has_its_window(family, changes, want):
    config = read(family, **changes)
    assert config.windows == want
    windows = [getattr(kind, "window", None) for kind in distinct(config.cache_kinds)]
    assert windows == list(dict.fromkeys(want))


@pytest.mark.parametrize(
    ("value", "want"), [(..., ()), (None, ()), (-1, ()), (5, (5,)), ([5, 7, -1], (5, 7)), ([], ())]
)
def test_end_tokens_are_none_one_or_several(value, want):
    assert read(eos_token_id=value).eos_token_ids == want


def test_key_heads_default_to_query_heads():
    assert read(num_key_value_heads=...).num_key_value_heads == 6


# What configs of published models hold beside what is read, from many exporters.
SEEN = dict(
    _attn_implementation_autoset=True, _flash_attn_2_enabled=True, _model_name_or_path="a/b",
    is_llama_config=True, max_sequence_length=2048, model_max_length=131072, neftune_noise_alpha=5,
    num_logits_to_keep=1, partial_rotary_factor=1.0, rope_interleaved=False, tokenizer_class="T",
    unk_token_id=0, use_flash_attn=True, base_model_tp_plan={"layers.*.mlp": "colwise"},
    gradient_checkpointing=True, use_mrope=False, mlp_bias=False, attention_bias=False,
) | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}  # fmt: skip


@families
def test_keys_of_published_models_that_say_nothing_of_the_maths_pass(family):
    assert read(family, **SEEN) == read(family)


@families
def test_harmless_keys_change_nothing(family):
    assert read(family, **dict.fromkeys(EVERY, "any")) == read(family)
    harmless = dict(mlp_bias_=None, quantization_config=None, pretraining_tp=1, new_feature=False)
    assert read(family, **harmless) == read(family)


REFUSED = {
    "unknown architecture": (
        dict(architectures=["T5ForConditionalGeneration"]),
        r"config\.json: architectures must be one of \[.*'Qwen3ForCausalLM'.*\], got "
        r"\['T5ForConditionalGeneration'\]",
    ),
    "no architecture": (dict(architectures=...), r"architectures must be one of .*, got \[\]"),
    "two": (dict(architectures=["LlamaForCausalLM"] * 2), r"architectures must be one of"),
    "architectures a string": (
        dict(architectures="LlamaForCausalLM"),
        r"config\.json: 'architectures' must be list, got 'LlamaForCausalLM'",
    ),
    "activation": (dict(hidden_act="gelu"), r"hidden_act='gelu' is not supported, only 'silu'"),
    "quantized": (
        dict(quantization_config=dict(quant_method="gptq")),
        r"quantization_config=.*gptq.* is not supported, only None: running without it would",
    ),
    "tensor parallel pretraining": (dict(pretraining_tp=2), r"pretraining_tp=2 is not supported"),
    "unknown key": (
        dict(logit_scale=0.5),
        r"unknown setting: logit_scale=0\.5\. Where that changes no outputs, pass hf_overrides="
        r"\{'logit_scale': None\}",
    ),
    "unknown keys, all at once": (
        dict(logit_scale=0.5, residual_bias=True, embedding_multiplier=12),
        r"3 unknown settings: embedding_multiplier=12, logit_scale=0\.5, residual_bias=True\. .*"
        r"\{'embedding_multiplier': None, 'logit_scale': None, 'residual_bias': None\}",
    ),
    "rotation of a part": (
        dict(partial_rotary_factor=0.5),
        r"partial_rotary_factor=0\.5 is not supported, only 1\.0",
    ),
    "missing": (dict(hidden_size=...), r"has no 'hidden_size': it is needed to build the model"),
    "null": (dict(vocab_size=None), r"has no 'vocab_size'"),
    "a string": (dict(hidden_size="24"), r"'hidden_size' must be int, got '24'"),
    "a float": (dict(num_hidden_layers=3.0), r"'num_hidden_layers' must be int, got 3\.0"),
    "a bool": (dict(num_attention_heads=True), r"'num_attention_heads' must be int, got True"),
    "a number for a bool": (dict(tie_word_embeddings=1), r"'tie_word_embeddings' must be bool"),
    "a number for a name": (dict(architectures=[3]), r": architectures\[0\] must be str, got 3"),
    "zero": (dict(intermediate_size=0), r"'intermediate_size' must be at least 1, got 0"),
    "negative": (dict(head_dim=-2), r"'head_dim' must be at least 1, got -2"),
    "NaN": (dict(rms_norm_eps=float("nan")), r"'rms_norm_eps' must be finite, got nan"),
    "infinite": (dict(rope_theta=float("inf")), r"'rope_theta' must be finite, got inf"),
    "end token a string": (dict(eos_token_id="</s>"), r"'eos_token_id' must be .*, got '</s>'"),
    "uneven groups": (
        dict(num_key_value_heads=4),
        r"config\.json: num_attention_heads=6 must be a multiple of num_key_value_heads=4",
    ),
    "odd head": (dict(head_dim=9), r"head_dim=9 must be even: rotary positions turn pairs"),
    "dtype": (dict(torch_dtype="float64"), r"dtype of config\.json must be one of .*'float64'"),
    "new dtype": (dict(dtype="int8"), r"dtype of config\.json must be one of .*, got 'int8'"),
    "window of a family without": (dict(sliding_window=5), r"unknown setting: sliding_window=5"),
    "layers without end": (
        dict(num_hidden_layers=10**6),
        r"'num_hidden_layers' must be at most 1024, got 1000000",
    ),
    "a head without end": (dict(head_dim=10**9), r"'head_dim' must be at most 4096, got 10{9}"),
    "more digits than Python prints": (
        dict(vocab_size=10**5000),
        r"'vocab_size' must be at most 4194304, got a int that has no repr",
    ),
    "an epsilon below zero": (dict(rms_norm_eps=-1.0), r"rms_norm_eps must be from 0 to 1, got -1"),
    "an end token beyond int32": (
        dict(eos_token_id=[5, 2**31]),
        r"eos_token_id must be ids from 0 to 2147483647, got 2147483648",
    ),
    "an end token below -1": (dict(eos_token_id=-2), r"eos_token_id must be ids from 0 .*, got -2"),
    "architectures of no strings": (
        dict(architectures=[["LlamaForCausalLM"]]),
        r"architectures\[0\] must be str, got \['LlamaForCausalLM'\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_what_we_do_not_honour_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        read(**changes)


@pytest.mark.parametrize(
    "kinds", [["full_attention"], ["full_attention", "chunked_attention", "full_attention"]]
)
def test_layer_types_must_be_known_and_as_many_as_layers(kinds):
    with pytest.raises(ValueError, match=r"layer_types must name full_attention or .* 3 layers"):
        read("Qwen3", layer_types=kinds)
