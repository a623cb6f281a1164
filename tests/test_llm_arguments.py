"""What `LLM` is called with: vLLM's keywords are taken or answered, bad values named."""

from functools import partial
import inspect
import math
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.arguments import Elsewhere, checked
from jaxrunner.api.validation import Bound, shown
from jaxrunner.loading import llm_arguments
from jaxrunner.worker.worker import Worker
from tests.support.small_llm import SIZES

MODEL: Any = str(embedded.PATH)
LLM_: Any = LLM  # whose keywords are to be wrong
JUNK: tuple[Any, ...] = (
    b"1", bytearray(b"1"), 1j, object(), object, len, ..., np.array(1), np.array([1, 2]), slice(1),
    {3}, 10**5000, math.nan, math.inf, -1.5, [[1]], [None], {"a": 1}, np.datetime64("2020-01-01"),
    -(2**70), "\ud800",
)  # fmt: skip
TAKEN: dict[str, Any] = dict(
    tensor_parallel_size=1, quantization=None, enable_chunked_prefill=True, disable_log_stats=False,
    enable_sleep_mode=True, tokenizer_mode="auto", load_format="safetensors", dtype="float",
    runner="generate", max_logprobs=5, download_dir=None, hf_token=None, tokenizer_revision=None,
    scheduling_policy="priority", num_gpu_blocks_override=16, swap_space=0, seed=None,
    override_generation_config={"temperature": 0.5, "max_new_tokens": 7}, model_impl="auto",
    long_prefill_token_threshold=0, pipeline_parallel_size=1, task="auto", compilation_config=None,
    enable_lora=False, limit_mm_per_prompt={}, cpu_offload_gb=0, **{"trust_remote_code": False},
    async_scheduling=True, guided_decoding_backend="guidance", disable_custom_all_reduce=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    ours = {k: v for k, v in SIZES.items() if k not in ("num_blocks", "dtype")}
    with LLM_(MODEL, **ours, **TAKEN) as llm:
        yield llm


def test_what_asks_for_what_is_done_anyway_is_taken(llm):
    config = llm.engine.config
    assert (config.policy, config.num_blocks, config.dtype) == ("priority", 16, "float32")
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.max_tokens, defaults.top_p) == (0.5, 7, 0.95)
    with pytest.raises(ValueError, match="logprobs=6 exceeds max_logprobs=5 of this LLM"):
        llm.generate("x", SamplingParams(logprobs=6))
    with pytest.raises(ValueError, match="logprobs=-1 exceeds max_logprobs=5"):
        llm.stream("x", SamplingParams(prompt_logprobs=-1)).__next__()
    assert llm.generate("x", SamplingParams(logprobs=5, max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.parametrize("name", llm_arguments.ELSEWHERE)
def test_a_keyword_of_vllm_is_answered_with_what_to_do(name):
    theirs = llm_arguments.ELSEWHERE[name]
    value: Any = "other" if theirs.each is None else [3]
    with pytest.raises(ValueError, match=f"^LLM: {name}=.* is not supported: ") as error:
        LLM_(MODEL, **{name: value})
    assert str(error.value).endswith(theirs.instead)
    assert name not in llm_arguments.LLM.keys() | llm_arguments.RENAMED.keys()


@pytest.mark.parametrize(
    "name, near",
    [("tensor_paralel_size", "tensor_parallel_size"), ("max_seqs", "max_num_seqs"),
     ("gpu_memory_utilisation", "gpu_memory_utilization"), ("num_block", "num_blocks"),
     ("tokenizr", "tokenizer"), ("sheduling_policy", "scheduling_policy")],
)  # fmt: skip
def test_a_keyword_that_is_not_there_is_answered_with_the_nearest(name, near):
    with pytest.raises(TypeError, match=f"^LLM has no argument '{name}': the nearest is '{near}'"):
        LLM_(MODEL, **{name: 1})
    with pytest.raises(TypeError, match=r"^LLM has no argument 'qqqqqq': it has all2all_backend, "):
        LLM_(MODEL, qqqqqq=1)
    with pytest.raises(TypeError, match="LLM is given policy twice: give it once"):
        LLM_(MODEL, policy="fcfs", scheduling_policy="fcfs")


def keywords(function: Any) -> set[str]:
    named = inspect.signature(function).parameters.values()
    return {p.name for p in named if p.kind is not p.VAR_KEYWORD} - {"self"}


def test_bad_values_are_refused_by_name_before_anything_is_done():
    wrong, count = [], 0
    worker: Any = Worker
    for make, table in ((LLM_, llm_arguments.LLM), (worker, llm_arguments.WORKER)):
        assert keywords(make.__init__) - {"logits_fn", "devices"} <= table.keys()
        for name, bound in table.items():
            fine = {dict: (dict,), str: (), float: (), int: (int,), bool: ()}[bound.kind]
            values = [v for v in JUNK if type(v) not in fine]
            values = [v for v in values if not (bound.each and isinstance(v, set | np.ndarray))]
            values += [True] if bool not in (bound.kind, *bound.also) else [2, 1]
            values += [None] if not (bound.optional or bound.each or name == "seed") else []
            values += [bound.low - 1, bound.high + 1] if bound.kind in (int, float) else []
            for value in values:
                count += 1
                fields = dict(model="/nowhere") | {name: value}
                try:
                    make(**fields)
                except (TypeError, ValueError) as error:
                    known = name in str(error).partition(" ")[0]
                    wrong += [] if known else [f"{name}={shown(value)}: {error}"]
                except FileNotFoundError:
                    wrong.append(f"{name}: accepted {shown(value)}")
    assert not wrong and count > 1000, f"{len(wrong)} of {count}: {wrong[:20]}"


def test_arguments_of_methods_are_refused_by_name(llm):
    talk, one = [{"role": "user", "content": "x"}], SamplingParams(max_tokens=1)
    calls: Any = [
        (llm.generate, ("x", one), ("use_tqdm", "on_error", "lora_request", "prompt_token_ids")),
        (llm.stream, ("x", one), ("on_error", "lora_request")),
        (partial(llm.chat, chat_template="x"), (talk, one), (
            "use_tqdm", "chat_template", "add_generation_prompt", "continue_final_message",
            "tools", "chat_template_kwargs")),
        (llm.score_tokens, ("x",), ("use_tqdm",)),
        (llm.loglikelihood, (), ("pairs",)),
        (llm.abort, (), ("request_id",)),
        (llm.collective_rpc, (), ("method",)),
        (llm.apply_model, (), ("func",)),
        (llm.reset_prefix_cache, (), ("reset_running_requests",)),
    ]  # fmt: skip
    wrong, count = [], 0
    for method, args, names in calls:
        for name in names:
            for value in (3, 1.5, b"x", [3], np.array([1, 2]), object(), 10**5000):
                count += 1
                try:
                    list(method(*args, **{name: value}))
                    wrong.append(f"{method}: {name} accepted {shown(value)}")
                except (TypeError, ValueError) as error:
                    known = name in str(error).replace("pair 0", "pairs")
                    wrong += [] if known else [f"{method} {name}={shown(value)}: {error}"]
    assert not wrong and count > 100, wrong[:20]
    with pytest.raises(TypeError, match=r"^LLM\.generate has no argument 'use_tdqm': the nearest"):
        llm.generate("x", use_tdqm=False)
    with pytest.raises(TypeError, match="messages must be a list of dicts, got int"):
        llm.chat(3)
    with pytest.raises(TypeError, match="chat_template_kwargs has the name 3: names are strings"):
        llm.chat(talk, chat_template="x", chat_template_kwargs={3: 1})
    with pytest.raises(ValueError, match="chat_template_kwargs has 'tools', an argument itself"):
        llm.chat(talk, chat_template="x", chat_template_kwargs={"tools": []})
    with pytest.raises(TypeError, match="tools must be a list of dicts or None, got"):
        llm.chat(talk, chat_template="x", tools=[3])


def test_overrides_of_generation_are_refused_by_name():
    for key, value, message in (
        ("beams", 3, "override_generation_config has 'beams', it may have temperature, top_k"),
        ("top_p", 3, "override_generation_config: top_p=3 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(MODEL, **SIZES, override_generation_config={key: value})


def test_the_hub_is_asked_as_the_user_says(monkeypatch):
    asked: list[dict[str, Any]] = []

    def download(model, **kwargs):
        asked.append(dict(model=model) | kwargs)
        return embedded.PATH

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    given = dict(download_dir=Path("/kept"), hf_token="secret", tokenizer_revision="v2")
    with LLM_("some/model", **SIZES, revision="v1", **given) as llm:
        assert "secret" not in repr(llm.load_config)
    assert {(a["model"], a["revision"]) for a in asked} == {("some/model", r) for r in ("v1", "v2")}
    assert all((a["cache_dir"], a["token"]) == (Path("/kept"), "secret") for a in asked)
    with pytest.raises(ValueError, match=r"^tokenizer='' must be a folder, or owner/name"):
        LLM(MODEL, **SIZES, tokenizer="")


def test_a_function_gets_plain_values_and_what_it_names():
    class Some:
        @checked(dict(size=Bound(int, 1, 9), more=Bound(bool)), renamed=dict(length="size"),
                 elsewhere=dict(gone=Elsewhere("go", (0,))))  # fmt: skip
        def run(self, size: int, **rest: Any) -> Any:
            return size, rest

    some: Any = Some()
    assert (
        some.run(np.int64(3), more=True, gone=0)
        == some.run(length=3, more=True)
        == (3, {"more": True})
    )
    with pytest.raises(ValueError, match=r"run: gone=1 is not supported: go"):
        some.run(3, gone=1)
    with pytest.raises(ValueError, match="length=10 is out of range: take an integer from 1 to 9"):
        some.run(length=10)
    with pytest.raises(TypeError, match="run"):
        some.run(3, 4)
