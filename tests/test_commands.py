"""`python -m jaxrunner` and `python -m jaxrunner.bench`, run in this process."""

from dataclasses import replace
import json
import sys

import pytest

from jaxrunner import __main__, bench, embedded


def test_the_demo_streams_several_completions(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrunner", "--max-tokens", "12"])
    __main__.main()
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith("jaxrunner ")
    for prompt in __main__.PROMPTS:
        assert prompt in shown
    assert shown.count("--- length ---") + shown.count("--- stop ---") == len(__main__.PROMPTS)
    assert "tokens/s" in shown and "Next:" in shown


def test_the_demo_completes_its_argument(monkeypatch, capsys):
    argv = ["jaxrunner", "--max-tokens", "5", "--model", str(embedded.PATH), "def fib(n):"]
    monkeypatch.setattr(sys, "argv", argv)
    __main__.main()
    assert "\ndef fib(n):" in capsys.readouterr().out


def test_bench_writes_every_figure(monkeypatch, tmp_path, capsys):
    small = replace(
        bench.PRESETS["tiny"], batches=(1, 2), sampled_batches=(2,), context=8, short=1, long=3,
        prefill=(2, 16), ttft=(4,), offline=(3, 4, 2), mixed=((2, 5), (1, 3)),
        engine=dict(dtype="float32", max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32,
                    token_buckets=(32,), decode_buckets=(2,), use_tqdm=False),
    )  # fmt: skip
    monkeypatch.setitem(bench.PRESETS, "tiny", small)
    out = tmp_path / "tiny.json"
    monkeypatch.setattr(sys, "argv", ["bench", "tiny", "--out", str(out)])
    bench.main()
    result = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""])) == result
    names = {"prefill_tok_s_16x2", "ttft_ms_1x4", "offline_3x(4+2)_out_tok_s", "startup_s"}
    assert names <= result.keys()
    decode = result["decode_ms_per_step"]
    assert decode.keys() == {"greedy_b1_ctx8", "greedy_b2_ctx8", "topk_topp_b2_ctx8"}
    assert all(result[name] > 0 for name in names)


@pytest.mark.parametrize("name", ["llama8b", "qwen06b"])
def test_presets_are_readable_configs(name):
    from jaxrunner.models.registry import read_model
    from jaxrunner.settings import Settings

    _, config = read_model(Settings(bench.PRESETS[name].config))
    assert config.dtype == "bfloat16" and config.num_key_value_heads == 8
