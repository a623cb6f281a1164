"""How large an engine of a model of others is, and whether kernels serve it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrunner import pytree
from jaxrunner.bench.presets import PRESETS
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.device.operations import operations
from jaxrunner.device.program_key import Key
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from jaxrunner.ops.backends import choose_ops, dense, fused, paged, refuses
from jaxrunner.program.bucket import Bucket
from jaxrunner.program.program import Program
from jaxrunner.programs.build import build
from jaxrunner.sampling import RULES
from jaxrunner.types import Batch
from jaxrunner.worker import sizing
from jaxrunner.worker.memory_plan import Device
from jaxrunner.worker.program_memory import ProgramMemory, latents, mixer
from tests.outside import checkpoint, recurrent, resized_blocks
from tests.outside.int8_linear import int8_llama
from tests.support import tiny
from tests.support.lowering import NEW, cuda, lowers

LARGE: dict[str, Any] = checkpoint.LLAMA | dict(
    architectures=["x"], head_dim=64, num_attention_heads=2, num_key_value_heads=1, hidden_size=128
)
SIZES: dict[str, Any] = dict(max_num_seqs=6, block_size=4, max_num_batched_tokens=32)
FREE = Device(limit=10**9, others=0)


def states_alone() -> recurrent.StatesAlone:
    return recurrent.StatesAlone(**vars(recurrent.read(Settings(LARGE))))


def plan(
    config: ModelConfig, model: Model = recurrent.recurrent, dtype: str = "float32", **sizes: Any
):
    loaded: Any = tiny.loaded()._replace(model=model, config=config, dtype=dtype)
    return sizing.plan_engine(loaded, **SIZES | sizes)


def test_states_alone_take_no_blocks_of_tokens(monkeypatch):
    monkeypatch.setattr(sizing, "read_device", lambda *_: None)
    e, memory, built = plan(states_alone())
    of_states = 2 * (6 + 1) * (1 + recurrent.DEPTH) * 4
    assert (memory.kv, e.max_model_len) == (0, 64) and e.num_blocks == 6 * 64 // 4
    hybrid = plan(recurrent.read(Settings(LARGE))).memory
    assert hybrid.kv > 0 and built.program.cache_groups[0].num_blocks == 7
    assert memory.tables - hybrid.tables == of_states // 2 - 6 * 16 * 4  # a table of blocks less


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_states_are_part_of_the_plan_of_a_device(monkeypatch, enforce_eager):
    monkeypatch.setattr(sizing, "read_device", lambda *_: FREE)
    monkeypatch.setattr(sizing, "measure", lambda *_: ProgramMemory("step", 1000, 10))
    few, many = (
        plan(recurrent.read(Settings(LARGE)), max_num_seqs=n, enforce_eager=enforce_eager,
             kv_cache_memory_bytes=10**6).memory
        for n in (6, 7)
    )  # fmt: skip
    slot = dict(tables=many.tables - few.tables)
    plain = [
        plan(llama.read(Settings(LARGE)), llama, max_num_seqs=n, enforce_eager=enforce_eager,
             kv_cache_memory_bytes=10**6).memory.tables
        for n in (6, 7)
    ]  # fmt: skip
    one_block_table, state = 4, (1 + recurrent.DEPTH) * 4 * (1 + enforce_eager)
    assert slot["tables"] - (plain[1] - plain[0]) == one_block_table + state


def test_what_layers_without_a_kernel_take_is_measured(monkeypatch):
    """The estimate is of our own layers whose keys, latents or states a kernel serves."""
    whole, asked = sizing.build, []

    def with_kernels(*args: Any, **kwargs: Any):
        built = whole(*args, **kwargs)
        return built._replace(program=replace(built.program, sample=print))

    def measure(*args: Any) -> ProgramMemory:
        asked.append(args)
        return ProgramMemory("step", 1000, 10)

    monkeypatch.setattr(sizing, "read_device", lambda *_: FREE)
    monkeypatch.setattr(sizing, "build", with_kernels)
    monkeypatch.setattr(sizing, "measure", measure)
    assert plan(recurrent.read(Settings(LARGE)), gpu_memory_utilization=0.5).memory.program == 1000
    assert len(asked) == 1
    monkeypatch.setattr(sizing, "read_device", lambda *_: Device(limit=10**10, others=0))
    sizes: dict[str, Any] = dict(max_model_len=512, gpu_memory_utilization=0.9)
    model, config = read_model(Settings(PRESETS["deepseek_v2_lite"].config))
    served: dict[str, Any] = sizes | dict(block_size=64, dtype="bfloat16")
    for name, value in dict[str, Any](block_size=4, dtype="float32", kv_cache_dtype="fp8").items():
        assert plan(config, model, **served | {name: value}).memory.program == 1000
    assert len(asked) == 4
    known = plan(config, model, **served).memory.program
    assert known > 1000 if NEW else known == 1000  # an older JAX has no kernels
    asked.clear()
    model, config = read_model(Settings(PRESETS["granite4_h_tiny"].config))
    assert plan(config, model, **sizes).memory.program > 1000
    assert not asked
    monkeypatch.setattr(sizing, "serves", lambda *_: False)
    assert plan(config, model, **sizes).memory.program == 1000


@pytest.mark.parametrize(
    "name,tokens,largest",
    [("granite4_h_tiny", 8192, 523), ("qwen35_9b", 8192, 758), ("qwen35_9b", 512, 193)],
)
def test_the_bound_of_mixers_is_over_what_xla_says_of_an_h200(name, tokens, largest):
    """MiB of a whole `step`, in which mixers take most."""
    model, config = read_model(Settings(PRESETS[name].config))
    sizes = EngineConfig(
        max_model_len=8192, num_blocks=8, max_num_batched_tokens=tokens,
        dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    program = build(model, config, sizes, ()).program
    model_config: Any = config
    bound = mixer(program, model_config.state)
    assert largest <= bound / (1 << 20) <= 1.8 * largest


GLM_FLASH = dict(qk_nope_head_dim=192, v_head_dim=256, q_lora_rank=768)


@pytest.mark.parametrize(
    "heads,tokens,more,largest",
    [(16, 8192, {}, 415), (64, 4096, {}, 789), (128, 8192, {}, 3016), (20, 8192, GLM_FLASH, 674)],
)
def test_the_bound_of_latents_is_over_what_xla_says_of_an_h200(heads, tokens, more, largest):
    """MiB of a whole `step` of narrow MLPs, in which attention takes most."""
    raw = PRESETS["deepseek_v2_lite"].config
    more = more | dict(num_attention_heads=heads, num_key_value_heads=heads)
    model, config = read_model(Settings(raw | more))
    sizes = EngineConfig(
        max_model_len=8192, num_blocks=8, max_num_batched_tokens=tokens,
        dtype="bfloat16", kv_dtype="bfloat16",
    )  # fmt: skip
    bound = latents(build(model, config, sizes, ()).program)
    assert largest <= bound / (1 << 20) <= 1.3 * largest


def test_kernels_are_asked_about_each_group_that_they_read(monkeypatch):
    hopper = SimpleNamespace(compute_capability="9.0", device_kind="fake")
    engine = EngineConfig(
        max_model_len=64, num_blocks=64, block_size=8, dtype="bfloat16", kv_dtype="bfloat16"
    )
    ours = llama.read(Settings(LARGE))
    monkeypatch.setattr(jax, "local_devices", lambda: [hopper])
    want = refuses(ours, engine)
    assert want is None or "JAX" in want  # what it says of an older one
    choices = [
        choose_ops(read(Settings(LARGE)), engine) for read in (llama.read, resized_blocks.read)
    ]
    if want is None:  # attention alone is plain JAX where kernels refuse a group
        assert {choice.name for choice in choices} == {"mosaic_gpu"}
        with pytest.raises(ValueError, match=r"='mosaic_gpu' .*block_size.*got 4"):
            asked = replace(engine, attention_backend="mosaic_gpu")
            choose_ops(resized_blocks.read(Settings(LARGE)), asked)
    else:
        assert all("wants JAX 0.11 or later" in choice.reason for choice in choices)
    assert refuses(recurrent.read(Settings(LARGE)), engine) == want
    assert refuses(states_alone(), engine) is None
    small = refuses(resized_blocks.read(Settings(LARGE)), engine)
    assert small is not None and "block_size" in small and "got 4" in small
    assert refuses(resized_blocks.read(Settings(LARGE)), replace(engine, block_size=32)) == want


@lowers
@pytest.mark.parametrize("size", [Bucket(32, 32, 1), Bucket(64, 5)], ids=["decode", "mixed"])
def test_kernels_serve_layers_of_others(size):
    """Attention and norms run in them; products do not where weights are of another kind."""
    engine = EngineConfig(
        max_model_len=64, num_blocks=64, block_size=64, dtype="bfloat16", kv_dtype="bfloat16"
    )
    attention = "decode_attention" if size.query_len else "prefill_attention"
    for model in (recurrent.recurrent, int8_llama):
        config = model.read(Settings(LARGE | dict(intermediate_size=256)))
        params = pytree.abstract(model.params, config.dims | dict(param=jnp.dtype("bfloat16")))
        program = Program(model, config, engine, fused, RULES)
        with cuda():
            found = operations(program, params, Key("step", size))
        told = {one.operation: one.name for one in found}
        assert (told["attention"], told["add_norm"]) == (attention, "add_rms_norm")
        refused = {reason for one in found for reason in one.refused.values()}
        assert ("wants weights that are Linear, got Int8Linear" in refused) == (model is int8_llama)


def test_operations_know_their_batch_and_a_trainer_has_none():
    batch = object.__new__(Batch)
    object.__setattr__(batch, "query_len", 1)
    assert paged(batch).batch is batch and dense(1).batch is None
