"""How sizes that a user leaves open follow from the model and the device."""

from types import SimpleNamespace

import families
import jax
import numpy as np
import pytest
import tiny

from jaxrunner import worker


def config(params=(), model=None, **sizes):
    model = model or tiny.config()
    return worker.engine_config(model, params, dtype="float32", **sizes)


@pytest.fixture
def gpu(monkeypatch):
    """A device of 1 MB with 0.1 MB in use."""
    stats = dict(bytes_limit=10**6, bytes_in_use=10**5)
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_blocks_fill_what_the_device_has_left(gpu):
    one = worker.block_bytes(tiny.config(), "float32", 16)
    assert one == 2 * 2 * 16 * 2 * 8 * 4  # k and v, layers, tokens, heads, dims, bytes
    sizes = dict(max_model_len=64, block_size=16, max_num_seqs=100)
    assert config(**sizes, gpu_memory_utilization=0.5).num_blocks == (450_000 - 10**5) // one
    assert config(**sizes | dict(max_num_seqs=10)).num_blocks == 10 * 4  # no slot needs more
    assert config(**sizes, kv_cache_memory_bytes=5 * one + 1).num_blocks == 5
    assert config(**sizes, num_blocks=7).num_blocks == 7


def test_the_longest_that_fits_is_found(gpu):
    one = worker.block_bytes(tiny.config(), "float32", 16)
    sizes = dict(max_model_len=-1, block_size=16, max_num_seqs=3)
    assert config(**sizes, kv_cache_memory_bytes=5 * one + 1).max_model_len == 5 * 16
    assert config(**sizes, num_blocks=7).max_model_len == 7 * 16
    assert config(**sizes).max_model_len == 128  # the model's own
    with pytest.raises(ValueError, match="max_model_len must be an integer of at least 1, got -2"):
        config(**sizes | dict(max_model_len=-2))


def test_weights_that_leave_no_room_are_refused(gpu):
    weights = [np.zeros(10**5, np.float64)]
    with pytest.raises(MemoryError, match="800000 are in use: raise it or free memory"):
        config(weights, gpu_memory_utilization=0.8)


def test_defaults_follow_the_model_and_the_device():
    sizes = config()
    assert (sizes.max_model_len, sizes.kv_dtype) == (128, "float32")
    assert config(kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"
    if jax.default_backend() == "cpu":
        assert (sizes.max_num_batched_tokens, sizes.growth) == (512, 4)


def test_dynamic_rope_reaches_beyond_the_trained_positions():
    _, model, _ = families.model_and_params("llama, dynamic rope")
    assert worker.longest_len(model) == 128
    with pytest.raises(ValueError, match="max_model_len=129 is over the model's 128 positions"):
        config(model=model, max_model_len=129)


@pytest.mark.parametrize("name", ["num_blocks", "max_num_batched_tokens", "max_num_seqs"])
def test_a_size_of_zero_is_no_default(name):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got 0"):
        config(**{name: 0})
