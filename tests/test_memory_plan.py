"""Where memory goes: a plan that fits, and not a block less than fits."""

from dataclasses import replace
import functools
import re
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner.bench.presets import PRESETS
from jaxrunner.config import EngineConfig
from jaxrunner.device.lowering import Spec, extra_bytes, output_bytes
from jaxrunner.device.program_spec import program_keys
from jaxrunner.hf_config import Settings
from jaxrunner.models.llama import llama
from jaxrunner.models.registry import read_model
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.program.state import make_state
import jaxrunner.programs.build
from jaxrunner.programs.build import build
from jaxrunner.programs.program_table import Key, ProgramTable
from jaxrunner.worker import memory_plan, program_memory, sizing
from jaxrunner.worker.memory_plan import CPU_KV_BYTES, MemoryPlan, num_bytes
from jaxrunner.worker.program_memory import ProgramMemory
from tests.support import families, tiny

LIMIT, OTHERS, NEED = 10**7, 10**6, ProgramMemory("sample", 300_000, 100_000)
BLOCK = 2 * 20 * 16 * 2 * 8 * 4  # k and v, layers, tokens, heads, dims, bytes
SIZES: dict[str, Any] = dict(block_size=16, max_num_seqs=40)
WEIGHTS = {"a": np.zeros(10**5, np.float32), "b": np.zeros(10**5, np.int8)}


@pytest.fixture
def gpu(monkeypatch):
    """A device of 10 MB with 1 MB in use, whose programs are measured already."""
    stats = dict(bytes_limit=LIMIT, bytes_in_use=OTHERS)
    device = SimpleNamespace(memory_stats=lambda: stats, device_kind="fake")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(sizing, "measure", lambda *_: NEED)
    monkeypatch.setattr(memory_plan, "LOST", 1000)


def plan(model=None, **sizes):
    model = model or tiny.config(num_hidden_layers=20)
    config, memory, _ = sizing.plan_engine(tiny.loaded(model, WEIGHTS), **SIZES | sizes)
    return config, memory


@pytest.mark.parametrize("utilization", [0.4, 0.57, 0.9])
def test_blocks_take_what_is_left_and_no_more(gpu, utilization):
    config, p = plan(gpu_memory_utilization=utilization)
    assert p.requested == int(LIMIT * utilization)
    assert (p.weights, p.program) == (500_000, NEED.program)
    assert p.reserve == NEED.waiting + 400_000 + 1000  # beside the largest weight
    assert p.kv == config.num_blocks * BLOCK and p.num_tokens == config.num_blocks * 16
    assert p.total == p.weights + p.tables + p.kv + p.program + p.reserve
    assert p.total + p.unused == p.requested and 0 <= p.unused < BLOCK


def test_more_memory_is_more_blocks(gpu):
    counts = [plan(gpu_memory_utilization=u / 100)[0].num_blocks for u in range(30, 90, 10)]
    assert counts == sorted(set(counts))


def test_no_slot_needs_more(gpu):
    config, p = plan(max_num_seqs=9)
    assert config.num_blocks == 9 * 8 and p.unused > BLOCK


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("variant", ["llama", "qwen2, some windows"])
def test_what_is_planned_is_what_is_made(kv_cache_dtype, variant):
    _, model, _ = families.model_and_params(variant)
    config, p = plan(model, kv_cache_dtype=kv_cache_dtype, num_blocks=77)
    program = build(llama, model, config, ()).program
    state = make_state(program)
    assert num_bytes(state.kv) == p.kv == sum(x.nbytes for x in jax.tree.leaves(state.kv))
    assert num_bytes((state.requests, state.tables)) == p.tables


@pytest.mark.parametrize("variant", ["llama", "qwen2, some windows", "mistral"])
@pytest.mark.parametrize(
    "size",
    [dict(gpu_memory_utilization=0.4), dict(kv_cache_memory_bytes=40_000), dict(num_blocks=9)],
)
def test_the_longest_that_fits_is_found(gpu, variant, size):
    model, sizes = families.model_and_params(variant)[1], dict(max_num_batched_tokens=8) | size
    if "gpu_memory_utilization" in size:
        sizes |= dict(max_num_seqs=100)
    config, p = plan(model, max_model_len=-1, **sizes)
    assert p.unused >= 0
    if variant == "mistral":  # whose window has passed, wherever it starts
        assert config.max_model_len == 256 > p.num_tokens
        return
    longest = config.max_model_len
    assert 1 < longest < 256
    assert plan(model, max_model_len=longest, **sizes)[0] == config
    if "num_blocks" in size:  # which the scheduler refuses
        assert longest == 9 * 16
        return
    with pytest.raises(MemoryError, match=f"max_model_len={longest} would fit"):
        plan(model, max_model_len=longest + 1, **sizes)


@pytest.mark.parametrize(
    "size", [dict(gpu_memory_utilization=0.2), dict(kv_cache_memory_bytes=7 * BLOCK)]
)
def test_a_cache_that_holds_no_request_is_refused_with_what_would_help(gpu, size):
    (name, value) = next(iter(size.items()))
    with pytest.raises(MemoryError, match=rf"{name}={value} leaves .* bytes for the KV") as error:
        plan(**size)
    assert "one request of max_model_len=128 needs 327,680" in str(error.value)
    found = re.search(rf"raise {name} to ([\d.]+)", str(error.value))
    assert found is not None
    plan(**{name: type(value)(found[1])})
    less = value * 0.9 if isinstance(value, float) else 5 * BLOCK
    with pytest.raises(MemoryError, match=f"raise {name} to {found[1]}"):
        plan(**{name: less})


def test_what_the_device_has_not_is_refused(gpu):
    told = "9,500,000 bytes of 10,000,000, 9,000,000 are free: lower it to 0.9 or"
    with pytest.raises(MemoryError, match=re.escape(told)):
        plan(gpu_memory_utilization=0.95)
    with pytest.raises(MemoryError, match="let JAX use more of it"):
        plan(max_num_seqs=1000)
    for name, one in (("num_blocks", 1), ("kv_cache_memory_bytes", BLOCK)):
        with pytest.raises(
            MemoryError, match=rf"{name}={9999 * one} makes [\d,]+ bytes with all else"
        ) as error:
            plan(max_num_seqs=200, **{name: 9999 * one})
        fits = int(str(error.value).rpartition(f"{name}=")[2].split()[0])
        assert fits % one == 0 and plan(max_num_seqs=200, **{name: fits})[1].unused < BLOCK
        with pytest.raises(MemoryError, match="free: free memory"):
            plan(max_num_seqs=1000, **{name: 8 * one})


def test_without_a_wish_the_plan_takes_what_others_leave(gpu, monkeypatch):
    assert plan()[1].requested == LIMIT - OTHERS
    monkeypatch.setattr(memory_plan, "UTILIZATION", 0.5)
    assert plan()[1].requested == LIMIT // 2


def test_weights_on_the_device_are_not_others(gpu):
    weights = {"a": jax.numpy.zeros(10**5, np.int8)}
    device = memory_plan.read_device(weights, jax.local_devices())
    assert device is not None and device.free == LIMIT - OTHERS + 10**5


def test_an_eager_step_has_two_caches(gpu):
    config, p = plan(enforce_eager=True, num_blocks=5)
    assert (config.num_blocks, p.kv, p.program) == (5, 10 * BLOCK, LIMIT // 10)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a device that has no limit")
def test_a_cpu_has_no_limit():
    config, p = plan()
    assert config.num_blocks == min(40 * 8, CPU_KV_BYTES // BLOCK)
    assert (p.program, p.reserve, p.unused) == (0, 0, 0)
    with pytest.raises(ValueError, match="a device that tells its memory, cpu does not: give num"):
        plan(gpu_memory_utilization=0.9)
    with pytest.raises(MemoryError, match="raise kv_cache_memory_bytes to 327680"):
        plan(kv_cache_memory_bytes=1)


def test_the_table_adds_up():
    gib = 1 << 30
    text = str(MemoryPlan(10 * gib, 4 * gib, gib // 4, 3 * gib, gib, gib, 4096, "step"))
    rows = dict(re.findall(r"^  (\w[\w ]*?) +([\d.]+) GiB", text, re.MULTILINE))
    assert rows["requested"] == "10.000" and rows["unused"] == "0.750" and "4,096 tokens" in text
    assert sum(map(float, rows.values())) == 2 * 10 and "the largest, step" in text
    text = str(MemoryPlan(0, gib, gib, 2 * gib, 0, 0, 4096))
    assert [line.split()[0] for line in text.splitlines()] == ["weights", "tables", "KV"]


def test_the_largest_program_of_each_kind_is_measured():
    keys = [Key("step", Bucket(8, 4)), Key("step", Bucket(16, 4)), Key("step", Bucket(4, 4, 1))]
    wide = SampleSize(4, True, 61)
    keys += [Key("sample", SampleSize(4)), Key("sample", wide), Key("sample", SampleSize(1))]
    keys += [Key("multi_step", MultiStepBucket(8, wide)), Key("copy", SampleSize(99))]
    wanted = [
        Key("step", Bucket(16, 4)),
        Key("sample", wide),
        Key("multi_step", MultiStepBucket(8, wide)),
    ]
    assert program_memory.largest(keys) == wanted


def executable(temp: int, out: int, alias: int):
    memory = SimpleNamespace(
        temp_size_in_bytes=temp, output_size_in_bytes=out, alias_size_in_bytes=alias
    )
    return SimpleNamespace(memory_analysis=lambda: memory)


def test_outputs_of_other_launches_wait_beside_the_largest():
    one, two = Key("one", SampleSize(1)), Key("two", SampleSize(2))
    executables = {one: executable(100, 7, 5), two: executable(90, 60, 40)}
    assert program_memory.add_up(executables, 1) == ProgramMemory("two, 2 requests", 110, 2)
    assert program_memory.add_up(executables, 3).waiting == 3 * 22 - 20


def test_programs_need_what_the_compiler_says_whatever_the_cache(monkeypatch):
    model, params = tiny.model_and_params()
    usual = functools.partial(program_keys, all_rules=False)
    monkeypatch.setattr(program_memory, "program_keys", lambda *args, all_rules: usual(*args))
    few = build(llama, model, tiny.engine_config(num_blocks=8), params).program
    need = program_memory.measure(few, params, None)
    r = tiny.runner(num_blocks=60)
    keys = usual(r.program, r.buckets)
    r.programs.warm_up(keys)
    most = max(extra_bytes(r.programs[key]) for key in keys)
    apart = 0 if jax.default_backend() == "cpu" else 256  # bytes, as was seen on an H100
    assert abs(need.program - most) <= apart
    assert f"{need.program / (1 << 20):.1f} MiB: {need.name}" in r.programs.report()
    assert need.waiting >= max(output_bytes(r.programs[key]) for key in keys) > 0


def test_what_programs_need_is_remembered(tmp_path, monkeypatch):
    params = tiny.model_and_params()[1]
    monkeypatch.setattr(jaxrunner.programs.build, "jax_keeps_its_own", lambda: False)
    built = build(llama, tiny.config(), tiny.engine_config(), params, cache_dir=tmp_path)
    assert built.cache is not None and built.cache.recall("x") is None
    monkeypatch.setattr(ProgramTable, "warm_up", lambda *_: None)
    monkeypatch.setattr(ProgramTable, "__getitem__", lambda *_: executable(3, 2, 1))
    need = program_memory.measure(built.program, params, built.cache)
    assert need.program == 4
    monkeypatch.delattr(ProgramTable, "__getitem__")
    assert program_memory.measure(built.program, params, built.cache) == need
    for path in tmp_path.iterdir():
        path.write_text("no JSON")
    assert built.cache.recall(program_memory.NOTE) is None


def test_programs_are_compiled_before_there_is_a_cache(monkeypatch):
    r = tiny.runner()
    seen = []
    monkeypatch.setattr(r.programs, "wait", lambda *_, **__: seen.append("state" in vars(r)))
    monkeypatch.setattr(r, "_rehearse", lambda key: None)
    r.warm_up()
    assert seen == [False] and r.state.kv


@pytest.mark.parametrize("name,largest", [("llama8b", 1503.1), ("qwen06b", 1503.1 * 1.185)])
def test_the_estimate_is_over_what_xla_says_of_an_h200(name, largest):
    """MiB of `sample` with 256 rows and 20 logprobs; by the vocabulary for the second model."""
    model, config = read_model(Settings(PRESETS[name].config))
    sizes = EngineConfig(max_model_len=8192, num_blocks=8, dtype="bfloat16", kv_dtype="bfloat16")
    program = build(model, config, sizes, ()).program
    assert largest <= program_memory.estimate(program).program / (1 << 20) <= 1.3 * largest


def test_with_kernels_nothing_is_compiled_to_make_a_plan(gpu, monkeypatch):
    monkeypatch.setattr(sizing, "measure", None)
    whole = sizing.build
    monkeypatch.setattr(
        sizing, "build", lambda *a, **k: (b := whole(*a, **k))._replace(
            program=replace(b.program, sample=print)
        ),
    )  # fmt: skip
    sizes = dict(gpu_memory_utilization=0.9, max_num_batched_tokens=512)
    assert plan(**sizes)[1].program > 0


def test_a_program_that_takes_more_than_its_part_is_refused(gpu):
    p = plan(gpu_memory_utilization=0.9)[1]
    key, left = Key("step", Bucket(8, 4)), NEED.program + p.unused
    checked = p.checked((key, left))
    assert (checked.program, checked.unused, p.checked(None)) == (left, 0, p)
    assert "the largest, step, 8 tokens, " in str(checked)
    with pytest.raises(
        MemoryError, match=rf"takes {left + 1:,} bytes, the memory plan has {left:,}"
    ):
        p.checked((key, left + 1))
    free = plan(num_blocks=5)[1]
    assert free.checked((key, 7)).program == 7


def test_programs_that_do_not_tell_leave_the_plan_as_it_is(monkeypatch):
    silent = SimpleNamespace(memory_analysis=lambda: None)
    assert extra_bytes(silent) == output_bytes(silent) == 0
    programs = ProgramTable(lambda key: Spec(print, (), ()))
    monkeypatch.setattr(programs, "_table", {Key("step", Bucket(8, 4)): silent})
    assert programs.largest() is None and "takes" not in programs.report()
