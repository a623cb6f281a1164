"""Rotary frequencies are Hugging Face's, and parameters that give nonsense are refused."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.registry import read_model
from jaxrunner.models.rope import no_rope, rotation
from jaxrunner.program.bucket import Bucket
from jaxrunner.types import Inputs
from tests.support import tiny
from tests.support.checkpoints import NEEDS_TORCH, TINY

DIM = 20
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
LONG = dict(rope_type="longrope", original_max_position_embeddings=32, short_factor=[1.0] * 10,
            long_factor=[2] * 10)  # fmt: skip
SHORT = r"short_factor must be 10 factors of 1e-9 to 1e9, got \["
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
SCALINGS = {
    "default": dict(rope_type="default"),
    "another base": dict(rope_type="default", rope_theta=1e6),
    "linear": dict(rope_type="linear", factor=2.5),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": LLAMA3,
    "llama3, another base": LLAMA3 | dict(rope_theta=5e5, original_max_position_embeddings=8192),
    "llama3, no blend": LLAMA3 | dict(high_freq_factor=1.0),
    "llama3, narrow blend": LLAMA3 | dict(low_freq_factor=2.0, high_freq_factor=2.5),
    "yarn": YARN,
    "yarn, not truncated": YARN | dict(truncate=False),
    "yarn, betas": YARN | dict(beta_fast=16.0, beta_slow=2.0),
    "yarn, mscale": YARN | dict(mscale=0.7, mscale_all_dim=1.3),
    "yarn, mscale alone": YARN | dict(mscale=0.7),
    "yarn, attention factor": YARN | dict(attention_factor=1.25, mscale=0.7, mscale_all_dim=1.3),
    "yarn, factor 1": YARN | dict(factor=1.0),
    "yarn, no old length": dict(rope_type="yarn", factor=4.0),
    "yarn, one dimension blends": YARN | dict(original_max_position_embeddings=4),
}


def read_rope(parameters, **changes):
    values = TINY | dict(architectures=["LlamaForCausalLM"], head_dim=DIM) | changes
    config = read_model(Settings(values | dict(rope_parameters=parameters)))[1]
    assert isinstance(config, DecoderConfig)
    return config.rope


def turned(rope, rope_len):
    """Returns each pair's frequency and the scale, read off the rotation of position 1."""
    one = jnp.ones(1, jnp.int32)
    cos, sin = rotation(rope, Inputs(one, one, jnp.full(1, rope_len, jnp.int32)))
    return np.arctan2(sin[0, 0], cos[0, 0]), np.hypot(sin[0, 0], cos[0, 0])


@pytest.mark.parametrize("rope_len", [3, 64, 65, 301])
@pytest.mark.parametrize("parameters", SCALINGS.values(), ids=SCALINGS.keys())
def test_frequencies_are_those_of_transformers(parameters, rope_len):
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    transformers = pytest.importorskip("transformers", reason=NEEDS_TORCH)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(rope_theta=10000.0) | parameters
    config = transformers.LlamaConfig(**TINY | dict(head_dim=DIM), rope_parameters=dict(parameters))
    if parameters["rope_type"] == "default":
        module = LlamaRotaryEmbedding(config)
        want, scale = module.inv_freq, module.attention_scaling
    else:
        init = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        want, scale = init(config, "cpu", seq_len=rope_len)
    rope = read_rope(parameters)
    got, got_scale = turned(rope, rope_len)
    np.testing.assert_allclose(got, want.numpy(), rtol=3e-6, atol=1e-7)
    np.testing.assert_allclose(got_scale, scale, rtol=1e-6)
    if rope.dynamic is None:  # exact but for float32: HF computes in it, we in float64
        np.testing.assert_allclose(rope.inv_freq, want.numpy(), rtol=1e-6)


@pytest.mark.parametrize("rope_len", [5, 64, 65, 200])
def test_dynamic_scaling_follows_each_tokens_own_length(rope_len):
    rope = read_rope(SCALINGS["dynamic"])
    both = jnp.asarray([rope_len, 150], jnp.int32)
    ones = jnp.ones(2, jnp.int32)
    cos, _ = rotation(rope, Inputs(ones, ones, both))
    for i, length in enumerate([rope_len, 150]):
        alone, scale = turned(rope, length)
        np.testing.assert_allclose(cos[i, 0], np.cos(alone) * scale, atol=1e-6)


REFUSED = {
    "unknown": (dict(rope_type="su"), r"rope_type must be one of .*, got 'su'"),
    "of several axes": (dict(type="mrope", mrope_section=[1]), r"rope_type must .*, got 'mrope'"),
    "partial": (
        dict(rope_type="default", partial_rotary_factor=0.5),
        r"rope_parameters: partial_rotary_factor=0\.5 is not supported, only 1\.0",
    ),
    "no factor": (dict(rope_type="linear"), r"rope_parameters has no 'factor'"),
    "factor a string": (dict(rope_type="linear", factor="2"), r"'factor' must be float, got '2'"),
    "factor 0": (dict(rope_type="yarn", factor=0.0), r"factor of the rope scaling must be at lea"),
    "NaN": (dict(rope_type="dynamic", factor=float("nan")), r"'factor' must be finite, got nan"),
    "base 1": (dict(rope_type="default", rope_theta=1.0), r"rope_theta must be over 1, got 1\.0"),
    "no ends": (dict(rope_type="llama3", factor=8.0), r"has no 'low_freq_factor'"),
    "ends swapped": (
        LLAMA3 | dict(low_freq_factor=4.0, high_freq_factor=1.0),
        r"low_freq_factor=4\.0 must be over 0 and at most high_freq_factor=1\.0",
    ),
    "another length": (
        dict(rope_type="dynamic", factor=2.0, original_max_position_embeddings=32),
        r"original_max_position_embeddings=32 is not supported, only 64",
    ),
    "mscale below 0": (
        dict(rope_type="yarn", factor=math.e, mscale=1.0, mscale_all_dim=-10.0),
        r"mscale=1\.0 and mscale_all_dim=-10\.0 must be over 0, or 0 for none",
    ),
    "beta_fast 0": (YARN | dict(beta_fast=0.0), r"beta_fast must be over 0, got 0\.0"),
    "beta_slow 0": (YARN | dict(beta_slow=-1.0), r"beta_slow must be over 0, got -1\.0"),
    "no gain": (YARN | dict(attention_factor=0.0), r"attention_factor must be over 0, got 0\.0"),
    "long, gain below 0": (LONG | dict(attention_factor=-1.0), r"attention_factor must be over 0"),
    "long, factor below 0": (LONG | dict(factor=-3.0), r"factor must be over 0, got -3\.0"),
    "old length 1": (
        LONG | dict(original_max_position_embeddings=1),
        r"'original_max_position_embeddings' must be at least 2, got 1",
    ),
    **{
        f"a factor {value!s:.5}": (LONG | dict(short_factor=[value] * 10), SHORT)
        for value in (None, "1", True, float("nan"), 0.0, -1, 1e-300, 10**400)
    },
    "unknown key": (
        dict(rope_type="linear", factor=2.0, beta_fast=32.0),
        r"rope_parameters: 1 unknown setting: beta_fast=32\.0.*'factor': 2\.0\}\}$",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "match"), REFUSED.values(), ids=REFUSED.keys())
def test_scalings_that_we_do_not_honour_are_refused(parameters, match):
    with pytest.raises(ValueError, match=match):
        read_rope(parameters)


def test_factors_may_be_integers():
    long = read_rope(LONG).long
    assert long is not None and long.inv_freq[0] == 0.5


def test_a_partial_rotation_is_refused_where_old_files_say_it():
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0\.5 is not supported"):
        read_rope(None, partial_rotary_factor=0.5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of XLA's fusions on a CPU")
def test_angles_are_computed_once_for_all_layers_and_heads(whole):
    text = tiny.runner().programs[Key("step", Bucket(32, 5))].as_text()
    assert text.count(" cosine(") == text.count(" sine(") == 1


def test_no_rotation_makes_no_array_without_elements():
    """XLA of JAX 0.11 ends the process if such a constant is inside a `shard_map`."""
    inputs = Inputs(jnp.zeros(3, jnp.int32), jnp.arange(3), jnp.zeros(3, jnp.int32))
    turn = jax.jit(lambda: rotation(no_rope(8), inputs))
    assert "x0xf32" not in turn.lower().as_text() and "<0xf32" not in turn.lower().as_text()
    for found, expected in zip(turn(), (1.0, 0.0), strict=True):
        np.testing.assert_array_equal(found, np.full((3, 1, 4), expected))
