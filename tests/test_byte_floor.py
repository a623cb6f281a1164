"""The floor of a decode step: bytes of weights, keys and states, over a memory's nominal rate."""

import jax.numpy as jnp
import pytest

from jaxrunner import pytree
from jaxrunner.bench.byte_floor import RATE, floor_ms, read_share, request_bytes, weight_bytes
from jaxrunner.bench.presets import PRESETS
from jaxrunner.config import EngineConfig
from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.programs.build import build

FLOATS = [name for name, preset in PRESETS.items() if "quantization_config" not in preset.config]


def made(name):
    """Returns the program of a preset, and what stands for its weights, in bfloat16."""
    model, config = read_model(Settings(PRESETS[name].config))
    engine = EngineConfig(
        max_model_len=2048, num_blocks=64, max_num_seqs=4, dtype="bfloat16", kv_dtype="bfloat16"
    )
    params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
    return build(model, config, engine, params).program, params


def test_the_floor_of_a_decoder_is_its_weights_and_the_keys_of_its_requests():
    program, params = made("llama8b")
    E, F, V, H, K, D, Y = 4096, 14336, 128256, 32, 8, 128, 32
    layer = E * (H + 2 * K) * D + H * D * E + 3 * E * F + 2 * E
    weights = 2 * (Y * layer + V * E + E)  # the head, and no embedding
    assert weight_bytes(program.config, params, 1) == weights
    assert weight_bytes(program.config, params, 64) == weights
    keys = Y * 2 * K * D * 2
    assert request_bytes(program, 1096) == pytest.approx(1096 * keys)
    want = (weights + 8 * 1096 * keys) / 4.8e12 * 1e3
    assert RATE == 4.8e12 and floor_ms(program, params, 8, 1096) == pytest.approx(want)
    assert 3.1 < floor_ms(program, params, 1, 1096) < 3.2


def test_a_tied_embedding_is_read_as_the_output_layer():
    program, params = made("qwen06b")
    assert params.head is None
    assert 2 * 0.59e9 < weight_bytes(program.config, params, 1) < 2 * 0.6e9


def test_experts_are_read_as_far_as_tokens_choose_them():
    assert read_share(8, 2, 1) == pytest.approx(0.25)
    assert read_share(8, 2, 2) == pytest.approx(1 - 0.75**2)
    program, params = made("qwen3_30b_a3b")
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    one, many = (weight_bytes(program.config, params, batch) for batch in (1, 10_000))
    assert many - one == pytest.approx(experts * (1 - 8 / 128))
    assert 2 * 2.9e9 < one < 2 * 3.4e9 and 2 * 30e9 < many < 2 * 31e9


def test_a_window_is_read_as_far_as_it_reaches():
    program, _ = made("gemma3_12b")
    token, length = 2 * 8 * 256 * 2, 1500
    want = (8 * length + 40 * 1023) * token  # every sixth layer sees all
    assert request_bytes(program, length) == pytest.approx(want)


def test_states_are_read_and_written_whatever_the_length():
    """Of Qwen3.5 9B: 48 MiB of matrices, and the last inputs of convolutions."""
    program, params = made("qwen35_9b")
    token = 8 * 2 * 4 * 256 * 2
    matrices, inputs = 24 * 32 * 128 * 128 * 4, 24 * 3 * (2 * 16 + 32) * 128 * 2
    assert matrices == 48 << 20
    want = 2 * (matrices + inputs)
    assert request_bytes(program, 0) == pytest.approx(want)
    assert request_bytes(program, 1000) == pytest.approx(want + 1000 * token)
    assert 2 * 7.7e9 < weight_bytes(program.config, params, 1) < 2 * 8.2e9


@pytest.mark.parametrize("name", FLOATS)
def test_every_preset_has_a_floor(name):
    program, params = made(name)
    few, many = (floor_ms(program, params, batch, 1096) for batch in (1, 256))
    assert 0 < few < many
