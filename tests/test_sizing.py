"""How sizes that a user leaves open follow from the model and the device."""

import jax
import pytest

from jaxrunner.device.buckets import step_buckets
from jaxrunner.program.bucket import Bucket
from jaxrunner.worker import sizing
from tests.support import families, tiny


def config(model=None, **sizes):
    return sizing.plan_engine(tiny.loaded(model), **sizes)[0]


def test_defaults_follow_the_model_and_the_device():
    sizes = config(num_blocks=8)
    assert (sizes.max_model_len, sizes.kv_dtype) == (128, "float32")
    assert config(num_blocks=8, kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"
    if jax.default_backend() == "cpu":
        assert (sizes.max_num_batched_tokens, sizes.max_num_seqs) == (1024, 8)
        assert len(step_buckets(sizes)) == 5  # each is compiled for seconds
        larger = step_buckets(config(num_blocks=8, max_num_seqs=16, max_num_batched_tokens=512))
        assert larger[-1] == Bucket(512, 16) and Bucket(16, 16, 1) in larger


def test_dynamic_rope_reaches_beyond_the_trained_positions():
    _, model, _ = families.model_and_params("llama, dynamic rope")
    assert model.longest_len == 128
    with pytest.raises(ValueError, match="max_model_len=129 is over the model's 128 positions"):
        config(model=model, max_model_len=129)


@pytest.mark.parametrize("name", ["num_blocks", "max_num_batched_tokens", "max_num_seqs"])
def test_a_size_of_zero_is_no_default(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        config(**{name: 0})


def test_a_threshold_is_no_less_than_zero():
    text = "long_prefill_token_threshold must be an integer of at least 0, got -1"
    with pytest.raises(ValueError, match=text):
        config(long_prefill_token_threshold=-1)


def test_lengths_and_parts_are_checked():
    with pytest.raises(ValueError, match="max_model_len must be an integer of at least 1, got -2"):
        config(max_model_len=-2)
    with pytest.raises(ValueError, match="kv_cache_memory_bytes=0 is out of range"):
        config(kv_cache_memory_bytes=0)
    with pytest.raises(ValueError, match="gpu_memory_utilization must be over 0, at most 1, got 0"):
        config(gpu_memory_utilization=0)
