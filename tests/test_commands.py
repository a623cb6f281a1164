"""`python -m jaxrunner` and `python -m jaxrunner.bench`, run in this process."""

import contextlib
from dataclasses import replace
import functools
import json
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxrunner import LLM, SamplingParams, __main__, embedded
from jaxrunner.bench import command, device_time, host_time, kernels
from jaxrunner.kernels_pallas.cases.catalog import Case
from tests.support.small_llm import SIZES


def test_the_demo_streams_several_completions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrunner", "--max-tokens", "12"])
    __main__.main()
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("jaxrunner ")
    for prompt in __main__.PROMPTS:
        assert prompt in shown
    assert shown.count("--- length ---") + shown.count("--- stop ---") == len(__main__.PROMPTS)
    assert "tokens/s" in shown and "Next:" in shown


@pytest.mark.slow
def test_the_demo_drafts(monkeypatch, capsys):
    argv = ["jaxrunner", "--max-tokens", "8", "--drafts", "2", "def fib(n):"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(__main__, "LLM", lambda model, **sizes: LLM(model, **sizes | SIZES))
    __main__.main()
    plain, drafted = [x for x in capsys.readouterr().out.splitlines() if "tokens/s" in x]
    assert plain.split()[0] == drafted.split()[0]
    assert "with 2 drafts a step, " in drafted
    monkeypatch.setattr(sys, "argv", [*argv, "--model", str(embedded.PATH)])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "--drafts needs the embedded model" in capsys.readouterr().err


def test_the_demo_completes_its_argument(monkeypatch, capsys):
    argv = ["jaxrunner", "--max-tokens", "5", "--model", str(embedded.PATH), "def fib(n):"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(__main__, "LLM", lambda model, **sizes: LLM(model, **sizes | SIZES))
    __main__.main()
    assert "\ndef fib(n):" in capsys.readouterr().out


def test_the_demo_takes_keys_of_config_json(monkeypatch, capsys):
    def run(overrides: str) -> str:
        argv = ["jaxrunner", "--max-tokens", "2", "--hf-overrides", overrides, "def"]
        monkeypatch.setattr(sys, "argv", argv)
        with contextlib.suppress(SystemExit):
            __main__.main()
        return "".join(capsys.readouterr())

    assert "argument --hf-overrides: must be a JSON object, got Expecting" in run("{no")
    assert "argument --hf-overrides: must be a JSON object in braces, got [1]" in run("[1]")
    with pytest.raises(ValueError, match=r"unknown setting: logit_scale=2\."):
        run('{"logit_scale": 2}')


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_command_of_vllm_is_told_and_no_prompt(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrunner", command, "some/model"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert f"there is no command '{command}', and no server" in capsys.readouterr().err


def test_bench_writes_every_figure(monkeypatch, tmp_path, capsys):
    small = replace(
        command.PRESETS["tiny"], batches=(1, 2, 3), sampled_batches=(2,), context=8, new=4,
        prefill=(2, 16), ttft=(4,), offline=(2, 4, 2), mixed=((2, 5), (2, 4)),
        host_batches=(1, 2), host_steps=3,
        engine=SIZES,
    )  # fmt: skip
    monkeypatch.setitem(command.PRESETS, "tiny", small)
    out = tmp_path / "tiny.json"
    argv = ["bench", "tiny", "--out", str(out), "--repeats", "2", "--batches", "1", "2", "9",
            "--requests", "3", "--engine", "seed=3", "kv_cache_dtype=auto"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", argv)
    command.main()
    result = json.loads(out.read_text())
    printed, _, written = capsys.readouterr().out.partition("{")
    assert json.loads("{" + written) == result
    assert "greedy_b9_ctx8: left out, 9 requests do not fit at once" in printed
    assert result["engine"] == {"seed": 3, "kv_cache_dtype": "auto"}
    names = {"prefill_tok_s_16x2", "ttft_ms_1x4", "offline_3x(4+2)_out_tok_s", "startup_s"}
    assert names <= result.keys()
    decode = result["decode_ms_per_step"]
    assert decode.keys() == {"greedy_b1_ctx8", "greedy_b2_ctx8", "topk_topp_b2_ctx8"}
    floor = result["decode_floor_ms_per_step"]
    assert floor.keys() == decode.keys() and all(0 < floor[key] < decode[key] for key in floor)
    assert "4.8 TB/s, nominal" in result["decode_floor"]
    assert all(result[name] > 0 for name in names)
    for name in ("offline_mixed_3_ttft_ms", "offline_mixed_3_itl_ms"):
        assert 0 < result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    host, admission = result["host_us_per_step"], result["host_ms_per_admission"]["3x4"]
    assert host.keys() == {"b1", "b2"} and admission.keys() == {*host_time.PHASES, "host", "step"}
    assert all(0 < times["host"] < times["step"] for times in (*host.values(), admission))


def test_bench_times_kernels(monkeypatch, tmp_path, capsys):
    def make(seed):
        return jnp.zeros((4, 4)), jnp.ones((4, 4))

    made = []

    def profiled(calls):
        """Each call takes a microsecond more than that before it, from 6 to 14."""
        made.append([float(call()[-1].sum()) for call in calls])
        return [{"a": [1.0 + i % 9], "b": [2.0, 3.0]} for i, _ in enumerate(calls)]

    product = Case("product", "4 x 4", make, lambda x, y: x @ y, 128.0, "TFLOP/s", {})
    sums = Case("state_step", "4 x 4", make, lambda x, y: (y, x + y), 64.0, "TFLOP/s", {})
    monkeypatch.setattr(kernels, "BENCH", (product, sums))
    monkeypatch.setattr(kernels, "CEILINGS", (product._replace(amount=256.0),))
    monkeypatch.setattr(kernels, "BYTES", 200)  # the inputs of one case
    monkeypatch.setattr(kernels, "profiled", profiled)
    out = tmp_path / "kernels.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--kernels", "--out", str(out)])
    command.main()
    result = json.loads(out.read_text())
    assert result["product"]["4 x 4"] == dict(us=10.0, rate=pytest.approx(12.8e-6))
    assert result["state_step"]["4 x 4"] == dict(us=10.0, rate=pytest.approx(6.4e-6))
    assert result["ceilings"] == {"TFLOP/s": pytest.approx(25.6e-6)}
    # What a kernel writes, its next call goes on with; the first one is not timed.
    assert made == [[0.0] * 9, [0.0] * 9, [16.0 * i for i in range(2, 11)]]
    assert "50%" in capsys.readouterr().out
    refused = r"name begins with \(product, state_step\), got attention"
    with pytest.raises(ValueError, match=refused):
        kernels.run("attention")


def test_kernels_of_a_profile_are_those_between_marks():
    def event(name, at, tid=7, ph="X"):
        return dict(name=name, ph=ph, pid=1, tid=tid, ts=at, dur=float(at), args=dict(name=name))

    streams = [dict(event(name, 0, tid, "M"), name="thread_name") for name, tid in
               (("Stream #7(Compute)", 7), ("XLA Modules", 8))]  # fmt: skip
    launches = [event("b", 6), event("mark", 1), event("mark", 4), event("a", 2), event("a", 3)]
    before = [event("mark", -3), event("a", -2), event("a", 1.5), event("a", 4.5)]  # fill the cache
    events = [*streams, *launches, *before, event("module", 5, 8), event("c", 7)]
    found = device_time.by_call(events)
    assert found == [{"a": [2.0, 3.0]}, {"b": [6.0], "c": [7.0]}]
    assert device_time.median_us([*found, {"a": [4.0]}]) == 5.0
    assert device_time.median_us([*found, {"a": [4.0]}], "b") == 5.0  # of 5, 6 and 4
    assert device_time.by_call(streams) == []
    with pytest.raises(
        RuntimeError, match=r"wants \['a'\] before each call, got \['b', 'c'\]: try"
    ):
        device_time.by_call(event for event in events if event["ts"] != 4.5)


def test_a_profile_without_a_gpu_is_refused():
    if jax.default_backend() == "gpu":
        found = device_time.profiled([functools.partial(jnp.add, jnp.ones(8), 1)] * 2)
        assert len(found) == 2 and all(found)
        return
    with pytest.raises(RuntimeError, match=r"of each of 1 calls, got those of 0: it takes a GPU"):
        device_time.profiled([lambda: jnp.ones(8)])


def test_a_figure_of_repeated_runs_is_the_median():
    runs = [{"a": 3.0, "b": {"c": 1.0}}, {"a": 9.0, "b": {"c": 0.0}}, {"a": 4.0, "b": {"c": 7.0}}]
    assert command.medians(runs) == {"a": 4.0, "b": {"c": 1.0}}


def test_time_is_counted_once_for_what_calls_another():
    with LLM(str(embedded.PATH), **SIZES) as llm:
        with host_time.Clock() as clock:
            start = time.perf_counter()
            llm.generate(["def f(x):"], SamplingParams(max_tokens=8), use_tqdm=False)
            seconds = time.perf_counter() - start
            phases = clock.lap()
        assert not clock.lap() and phases.keys() == set(host_time.PHASES)
        assert 0.9 * seconds < sum(phases.values()) < seconds
        llm.generate(["def f(x):"], SamplingParams(max_tokens=1), use_tqdm=False)
        assert not clock.lap()
    with (
        host_time.Clock(),
        pytest.raises(RuntimeError, match="phases have a listener already: end"),
    ):
        host_time.Clock().__enter__()


FLOATS = [n for n, p in command.PRESETS.items() if "quantization_config" not in p.config]


@pytest.mark.parametrize("name", FLOATS)
def test_presets_are_readable_configs(name):
    from jaxrunner.hf_config import Settings
    from jaxrunner.models.registry import read_model

    _, config = read_model(Settings(command.PRESETS[name].config))
    assert config.dtype == "bfloat16"
