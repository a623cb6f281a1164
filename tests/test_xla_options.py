"""XLA's options for steps: which run kernels of a graph side by side."""

from dataclasses import replace

import jax
import pytest

from jaxrunner import pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.device import xla_options
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.models.registry import read_model
from jaxrunner.ops import backends
from jaxrunner.parallel.mesh import make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.sampling import RULES
from jaxrunner.speculators.drafted import with_drafter
from jaxrunner.speculators.eagle import eagle
from jaxrunner.speculators.eagle import read as read_eagle
from tests.support import dense_families, tiny
from tests.support.lowering import lowers

MODE, BESIDE = "xla_gpu_command_buffer_scheduling_mode", {"CONCURRENT"}


def program(preset: str, **changes) -> Program:
    settings = PRESETS[preset].config | changes
    model, config = read_model(Settings(settings))
    return Program(model, config, tiny.engine_config(dtype="bfloat16"), backends.fused, RULES)


def modes(of: Program, rows: int, lora: bool = False) -> set[str | None]:
    """Returns the modes of steps of so many rows, one and several a launch."""
    several = MultiStepBucket(8, SampleSize(rows), lora=lora)
    one = xla_options.of_step(of, Bucket(rows, rows, 1, lora=lora))
    found = map(dict, (one, xla_options.of_multi_step(of, several)))
    return {options.get(MODE) for options in found}


@pytest.mark.parametrize("lora", [False, True])
def test_steps_of_few_tokens_do(lora):
    llama = program("llama8b")
    assert modes(llama, 1, lora) == modes(llama, 8, lora) == BESIDE
    assert modes(llama, 16, lora) == modes(llama, 64, lora) == {None}


@pytest.mark.parametrize("preset", ["deepseek_v2_lite", "granite4_h_tiny", "qwen35_9b"])
def test_steps_with_shared_experts_or_states_do(preset):
    branched = program(preset)
    assert modes(branched, 8) == modes(branched, 64) == BESIDE
    assert modes(branched, 128) == {None}
    assert MODE not in dict(xla_options.of_step(branched, Bucket(64, 8)))  # of prompts


def test_steps_whose_mlp_does_not_wait_for_attention_do_not():
    model, config = read_model(Settings(dense_families.settings("command r")))
    beside = replace(program("llama8b"), model=model, config=config)
    assert modes(beside, 8) == modes(beside, 8, lora=True) == {None}


def test_experts_alone_do_not():
    assert modes(program("qwen3_30b_a3b"), 8) == modes(program("qwen3_30b_a3b"), 8, True) == {None}


def test_steps_with_drafts_do_not():
    """The layers of a draft model read nothing of the model's."""
    one = program("deepseek_v2_lite")
    llama = PRESETS["llama8b"].config | dict(hidden_size=2048, vocab_size=102400)
    head = read_eagle(Settings(llama | dict(num_hidden_layers=1)), one.config, frozenset())
    model, config = with_drafter(one.model, one.config, eagle, head, 3)
    drafted = replace(one, model=model, config=config)
    assert getattr(config, "concurrent_kernels", False)
    assert modes(drafted, 8) == modes(drafted, 8, True) == {None}


def test_steps_of_several_devices_do_not():
    one = program("deepseek_v2_lite")
    model, config = shard(one.model, one.config, make_mesh(2))
    assert modes(replace(one, model=model, config=config), 8) == {None}


@lowers
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_no_mlp_waits_for_its_blocks_beside_experts(rows):
    """Of a shape whose MLP would, and does where there are no experts."""
    sizes = dict(hidden_size=4096, moe_intermediate_size=1024, num_hidden_layers=2)
    mixture = program("deepseek_v2_lite", **sizes, n_shared_experts=12, vocab_size=512)
    found = _operations(mixture, rows)
    assert modes(mixture, rows) == BESIDE and "grouped_mlp" in found["experts"]
    dense = program("llama8b", intermediate_size=12288, num_hidden_layers=2, vocab_size=512)
    assert _operations(dense, rows)["mlp"] == {"gated_mlp"}
    assert "gated_mlp" not in found.get("mlp", set())


def _operations(of: Program, rows: int) -> dict[str, set[str]]:
    params = jax.eval_shape(lambda: pytree.zeros(of.model.params, of.dims))
    told: dict[str, set[str]] = {}
    for one in operations(of, params, Key("step", Bucket(rows, rows, 1))):
        told.setdefault(one.operation, set()).add(one.name)
    return told
