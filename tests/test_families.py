"""Dense families against transformers: tokens, logits, chunks, cached prefixes, shards."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxrunner import LLM, SamplingParams, pytree
from jaxrunner.check import compare as check
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.loading.weights import load_params, save_checkpoint
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.ops.backends import dense
from jaxrunner.program import Bucket, Program
from jaxrunner.sampling import RULES
from tests.support import dense_families, tiny
from tests.support.lowering import cuda, lowers

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 14, 15, 16, 33, 35, 40, 51, 60)
PROMPTS = [np.random.default_rng(n).integers(0, 61, n).tolist() for n in LENGTHS]
LONG = {"gemma 2": 64, "command r7b": 64}  # new tokens of a request; of others 16
# These differ from the others by what a test of few tokens tells already.
SLOW = (
    "gemma 3, beside a tower",
    "gemma 3, scaled, capped logits",
    "glm 4",
    "command r",
    "neox, one after the other",
)
QUICK = [name for name in dense_families.VARIANTS if name not in SLOW]
SLOW_ON_SHARDS = "gemma 3", "phi 4 mini", "glm 4, 0414", "granite 3", "starcoder 2", "pythia"
LARGE = dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=8, head_dim=128)
SIZES: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", max_model_len=128, block_size=8, num_blocks=400,
    max_num_seqs=16, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(16,),
    warm_up=False,
)  # fmt: skip


def generate(llm: LLM, num_tokens: int) -> list[Any]:
    prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize(
    "variant", [*QUICK, *(pytest.param(variant, marks=pytest.mark.slow) for variant in SLOW)]
)
def test_tokens_and_logits_are_those_of_transformers(variant, tmp_path):
    module = dense_families.save(variant, tmp_path)
    with LLM(tmp_path, **SIZES) as llm:  # 318 tokens of prompts, in chunks of 64 and less
        first = tokens(generate(llm, LONG.get(variant, 16)))
        again = generate(llm, LONG.get(variant, 16))  # most of each prompt is cached
    assert tokens(again) == first and again[-1].num_cached_tokens >= 40
    # Each token is the likeliest one after those before it: by induction, what generate gives.
    texts = [prompt + new for prompt, new in zip(PROMPTS, first, strict=True)]
    # LongRoPE turns short sequences otherwise: transformers asks for the longest of a batch.
    halves = [text for text in texts if len(text) <= 32], [text for text in texts if len(text) > 32]
    want = [logits for half in halves if half for logits in dense_families.logits(module, half)]
    for prompt, new, logits in zip(PROMPTS, first, want, strict=True):
        assert new == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    (exact,) = dense_families.logits(module.double(), PROMPTS[-1:])
    (got,) = check.ours(tmp_path, PROMPTS[-1:], None)
    np.testing.assert_allclose(got.logits, exact, atol=1e-4)


@pytest.mark.devices(2)
@pytest.mark.skipif(
    jax.__version_info__[:2] == (0, 11) and jax.default_backend() == "cpu",
    reason="XLA of JAX 0.11 ends the process while it compiles some of these for a CPU",
)
@pytest.mark.parametrize(
    "variant",
    [
        *("gemma 2", "command r7b", "gpt 2"),
        *(pytest.param(v, marks=pytest.mark.slow) for v in SLOW_ON_SHARDS),
    ],
)
def test_two_devices_tell_the_tokens_of_one(variant, tmp_path):
    dense_families.save(variant, tmp_path)
    found = []
    for devices in (1, 2):
        with LLM(tmp_path, tensor_parallel_size=devices, **SIZES) as llm:
            found.append(tokens(generate(llm, 16)))
    assert found[0] == found[1]


@pytest.mark.devices(2)
def test_norms_over_all_heads_are_not_cut(tmp_path):
    dense_families.save("olmo 2", tmp_path)
    with pytest.raises(ValueError, match="wants a model that runs on shards, Olmo2ForCausalLM"):
        LLM(tmp_path, tensor_parallel_size=2, **SIZES)


# What runs an operation on a GPU, in bfloat16, for 64 requests; "" where it is not asked for.
ROPE, NORM, MLP = "rope_write", "add_rms_norm", "gated_mlp"
RUNS = {
    "phi 3": (ROPE, NORM, MLP),
    "granite 3": (ROPE, NORM, MLP),
    "olmo 2": ("", NORM, MLP),  # whose one norm is that behind the last layer
    "ministral 3": ("", NORM, MLP),
    "command r7b": (ROPE, "", MLP),
    "gemma 2": (ROPE, "", ""),
    "gemma 3": ("", "", ""),
    "pythia": (ROPE, "", ""),
}


@lowers
@pytest.mark.parametrize("variant", RUNS)
def test_kernels_run_where_their_maths_is_the_familys(variant):
    keys = LARGE | dict(num_key_value_heads=8 if variant == "pythia" else 4)
    model, config = read_model(Settings(dense_families.settings(variant) | keys))
    assert isinstance(config, BlockConfig)
    engine = tiny.engine_config(block_size=64, dtype="bfloat16", kv_dtype="bfloat16")
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    program = Program(model, config, engine, backends.fused, RULES)
    with cuda():
        told = operations(program, params, Key("step", Bucket(64, 64, 1)))
    names = {one.operation: one.name for one in told}
    assert tuple(names.get(x, "") for x in ("rotate and write", "add_norm", "mlp")) == RUNS[variant]
    assert names["attention"] == "decode_attention"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("granite 3", dict(hidden_act="mish"), "hidden_act must be one of .*got 'mish'"),
    "kinds": ("gemma 2", dict(layer_types=["chunked_attention"] * 2), "layer_types must name full"),
    "cap": ("gemma 2", dict(final_logit_softcapping=-1.0), r"capping must be over 0, got -1\.0"),
    "cap of nothing": ("gemma 3", dict(attn_logit_softcapping=50.0), "attn_logit_.*not supported"),
    "scale": ("granite 3", dict(logits_scaling=0.0), r"logits_scaling must be over 0, got 0\.0"),
    "both ways": ("gemma 2", dict(use_bidirectional_attention=True), "use_bidir.*not supported"),
    "share": (
        "glm 4",
        dict(rope_parameters=dict(partial_rotary_factor=0.4)),
        r"partial_rotary_factor=0\.4 must be a share of head_dim=8 of whole pairs",
    ),
    "odd heads": ("gpt 2", dict(n_embd=42), "head_dim=7 must be even"),
    "factors": (
        "phi 4 mini",
        dict(rope_parameters=dense_families.LONG | dict(long_factor=[1.0])),
        r"long_factor must be 3 factors over 0, got \[1\.0\]",
    ),
    "turned layers": ("smollm 3", dict(no_rope_layers=[1]), "must have a number for 2 layers"),
    "norms of queries": ("command r", dict(use_qk_norm=True), "use_qk_norm=True is not supported"),
    "layers unlike": (
        "gpt 2",
        dict(scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx=True is not supported",
    ),
    "unknown": ("starcoder 2", dict(expert_count=3), "1 unknown setting: expert_count=3"),
    "pattern": (
        "exaone 4",
        dict(sliding_window_pattern="LLLG", layer_types=None),
        "no 'layer_types'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("variant", "changes", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_change_the_outputs_is_refused(variant, changes, words):
    with pytest.raises(ValueError, match=words):
        read_model(Settings(dense_families.settings(variant) | changes))


def test_unknown_extras_are_refused():
    model, config = read_model(Settings(dense_families.settings("gemma 2")))
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("float32")))
    run = functools.partial(model.layers, config, kv=(), inputs=None, ops=dense(1), extras=("x",))
    with pytest.raises(ValueError, match=r"extras .* are none of these layers': take some of"):
        run(params, None)


PUBLISHED = {  # keys beside those that transformers writes today
    "command r7b": dict(
        cache_implementation="hybrid", layer_switch=4, position_embedding_type="rope_gptj",
        order_of_interleaved_layers="local_attn_first", rotary_pct=1.0, sliding_window_pattern=4,
        use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True,
        use_parallel_embedding=False, use_qk_norm=False, head_dim=8,
    ),
    "exaone 4": dict(sliding_window_pattern="LLLG"),
    "gemma 2": dict(hidden_act="gelu", cache_implementation="hybrid"),
    "gpt 2": dict(n_ctx=128, task_specific_params={"text-generation": dict(max_length=50)}),
    "phi 3": dict(full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False),
    "smollm 3": dict(max_window_layers=28, pretraining_tp=2),
    "starcoder 2": dict(
        activation_function="gelu", attention_softmax_in_fp32=True, layer_norm_epsilon=1e-5,
        mlp_type="default", norm_type="layer_norm", scale_attention_softmax_in_fp32=True,
        scale_attn_weights=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", PUBLISHED)
def test_keys_of_published_configs_change_nothing(variant):
    values = dense_families.settings(variant)
    want, got = (read_model(Settings(v))[1] for v in (values, values | PUBLISHED[variant]))
    assert got == want


def test_a_published_config_may_leave_out_what_is_usual():
    text = dict(hidden_size=2560, intermediate_size=10240, model_type="gemma3_text",
                num_hidden_layers=34, rope_scaling=dict(factor=8.0, rope_type="linear"),
                sliding_window=1024)  # fmt: skip
    both = dict(architectures=["Gemma3ForConditionalGeneration"], eos_token_id=[1, 106],
                boi_token_index=255999, eoi_token_index=256000, image_token_index=262144,
                mm_tokens_per_image=256, vision_config=dict(hidden_size=1152),
                torch_dtype="bfloat16", text_config=text)  # fmt: skip
    config = read_model(Settings(both))[1]
    assert isinstance(config, BlockConfig)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024) and config.dtype == "bfloat16"
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (262208, 256, 4)
    full, sliding = config.ropes[5].inv_freq[1], config.ropes[0].inv_freq[1]
    np.testing.assert_allclose([full, sliding], [1e6 ** (-2 / 256) / 8, 1e4 ** (-2 / 256)], 1e-6)
    assert config.eos_token_ids == (1, 106) and config.tie_word_embeddings


SCALING = {key: value for key, value in dense_families.YARN.items() if key != "rope_theta"}
OLD = {  # config.json as the hub has it, and what transformers makes of it today
    "gemma 3": (
        dict(rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=2),
        ("rope_parameters", "layer_types", "_sliding_window_pattern"),
    ),
    "olmo 3": (
        dict(rope_theta=1e4, rope_scaling=SCALING),
        ("rope_parameters",),
    ),
    "pythia": (dict(rotary_pct=0.25, rotary_emb_base=10000), ("rope_parameters",)),
    "phi 4 mini": (
        dict(rope_theta=1e4, partial_rotary_factor=0.75, rope_scaling=dict(
            type="longrope", short_factor=dense_families.PAIRS,
            long_factor=dense_families.LONG["long_factor"])),
        ("rope_parameters",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", OLD)
def test_old_keys_say_the_same(variant):
    values, (old, gone) = dense_families.settings(variant), OLD[variant]
    want, got = (
        read_model(Settings(v))[1]
        for v in (values, {k: v for k, v in values.items() if k not in gone} | old)
    )
    assert got == want


def read_file(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


@pytest.mark.parametrize("variant", ["gpt 2", "pythia", "glm 4, 0414", "phi 3", "olmo 2"])
def test_weights_are_saved_as_they_were_read(variant, tmp_path):
    """Turned dimensions lie in another order here, and products are packed."""
    dense_families.save(variant, tmp_path)
    model, config = read_model(Settings(dense_families.settings(variant)))
    params = load_params(tmp_path, model, config, dtype="float32", progress=False)
    save_checkpoint(tmp_path / "again", model, config, params, {})
    want, got = read_file(tmp_path), read_file(tmp_path / "again")
    assert want.keys() == got.keys() and all((want[name] == got[name]).all() for name in want)


def test_names_without_their_beginning_and_masks_are_read(tmp_path):
    """As the first checkpoints of GPT-2 have them."""
    dense_families.save("gpt 2", tmp_path)
    model, config = read_model(Settings(dense_families.settings("gpt 2")))
    want = load_params(tmp_path, model, config, dtype="float32", progress=False)
    short = {name.removeprefix("transformer."): x for name, x in read_file(tmp_path).items()}
    short |= {f"h.{i}.attn.bias": np.ones((1, 1, 128, 128), np.uint8) for i in range(2)}
    safetensors.numpy.save_file(short, tmp_path / "model.safetensors")
    got = load_params(tmp_path, model, config, dtype="float32", progress=False)
    assert all(map(np.array_equal, jax.tree.leaves(want), jax.tree.leaves(got)))
