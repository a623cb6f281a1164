"""An engine saved at work goes on elsewhere as if nothing had been."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
import itertools
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import LLM
from jaxrunner.api.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots import serialization
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.engine.structured_output_manager import StructuredOutputManager
from jaxrunner.loading import orbax_io
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from tests.support import tiny
from tests.support.small_llm import SIZES
from tests.support.tiny_engine import PROMPTS, begin, drain, engine

ROOT = Path(__file__).parents[1]
RICH = SamplingParams(
    temperature=0.9, max_tokens=20, logprobs=2, prompt_logprobs=1, presence_penalty=0.5, seed=5,
    logit_bias={3: 1.5}, bad_words=[[4, 5]], stop_token_ids=[60],
    repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=9),
)  # fmt: skip


def finish(e: Engine, requests: dict[str, Request]) -> dict[str, Any]:
    """Returns what the requests end with, and one more that draws its seed from the engine."""
    requests = requests | {"new": e.add("new", PROMPTS[0], SamplingParams())}
    drain(e)
    return {
        name: (r.output_token_ids, r.finish_reason, r.num_cached_tokens)
        for name, r in requests.items()
    }


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        pytest.param(8, dict(num_blocks=13), id="preempted"),
        pytest.param(2, dict(num_decode_steps=4), id="4 steps a launch", marks=pytest.mark.slow),
    ],
)
def test_a_restored_engine_goes_on_with_the_same_tokens(steps, changes, tmp_path):
    first, second = engine(**changes), engine(**changes)
    begun = begin(first, steps)
    save_engine(first, tmp_path / "saved")
    live = {name: r for name, r in begun.items() if r.finish_reason is None}
    restored, _ = restore_engine(second, tmp_path / "saved")
    assert restored.keys() == live.keys()
    assert any(r.output_token_ids for r in restored.values())
    for name, request in restored.items():
        skip = dict(prefix_from=None, arrival=0)
        assert vars(request) | skip == vars(live[name]) | skip
    if "num_blocks" in changes:
        assert second.scheduler.num_preemptions and second.scheduler.num_waiting
    want = finish(first, live)  # the one that was saved goes on as well
    assert finish(second, restored) == want


def test_saving_changes_no_token(tmp_path):
    calm, saved = engine(), engine()
    want = finish(calm, begin(calm))
    begun = begin(saved)
    for i in range(3):
        save_engine(saved, tmp_path / str(i))
        saved.step()
    assert finish(saved, begun) == want


SCRIPT = """
import sys
from tests.support.small_llm import SIZES
from tests.support.tiny_engine import begin, engine
from jaxrunner.engine.snapshots.snapshot import save_engine
e = engine()
begin(e)
save_engine(e, sys.argv[1])
"""


@pytest.mark.slow
def test_another_process_goes_on(tmp_path):
    folder = tmp_path / "saved"
    # What this process compiles, that one need not.
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.values["jax_compilation_cache_dir"] or ""),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder)], check=True, cwd=ROOT,
        env=os.environ | compiled | {"PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    e, calm = engine(), engine()
    restored, _ = restore_engine(e, folder)
    want = finish(calm, begin(calm))
    got = finish(e, restored)
    assert len(got) > 3 and got == {name: want[name] for name in got}


def test_what_differs_is_named_and_nothing_changes(tmp_path):
    first, folder = engine(), tmp_path / "saved"
    begin(first)
    save_engine(first, folder)
    with pytest.raises(ValueError, match="saved is there already: name a new folder"):
        save_engine(first, folder)
    with pytest.raises(FileNotFoundError, match="none must be a folder that an engine was saved"):
        restore_engine(engine(), tmp_path / "none")
    with pytest.raises(RuntimeError, match="requests are at work: finish or abort them, then rest"):
        restore_engine(first, folder)
    with pytest.raises(ValueError, match="differs from this one in 1 things, it had num_blocks=60"):
        restore_engine(engine(num_blocks=59), folder)
    other = engine()
    other.update_params(tiny.random_params(other.model_config, seed=1))
    with pytest.raises(ValueError, match=r"it had params.* of sum 0x.*, not float32.*build this"):
        restore_engine(other, folder)
    assert not other.has_unfinished
    other.status.sleeping = frozenset({"weights"})
    with pytest.raises(RuntimeError, match="weights sleep"):
        restore_engine(other, folder)
    with pytest.raises(RuntimeError, match="weights sleep"):
        save_engine(other, tmp_path / "asleep")
    assert [p.name for p in tmp_path.iterdir()] == ["saved"]


@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
def test_only_blocks_that_count_are_saved_of_each_cache_group(kv_dtype, tmp_path):
    config, params = replace(tiny.config(), windows=(None, 5)), tiny.model_and_params()[1]
    sizes = tiny.engine_config(kv_dtype=kv_dtype, num_blocks=3000)
    first, second = (Engine(llama, config, sizes, params) for _ in range(2))
    state = first.runner.state
    kv = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(0), x.shape).astype(x.dtype), state.kv
    )
    first.runner.state = replace(state, kv=kv)
    counts = [3, 7]
    for pool, count in zip(first.pools, counts, strict=True):
        for block in (blocks := pool.take(count)):
            pool.publish(block, b"%d" % block, [block])
        pool.release(blocks)
    save_engine(first, tmp_path / "saved")
    restore_engine(second, tmp_path / "saved")
    for layer, old, count in zip(second.runner.state.kv, kv, counts, strict=True):
        pairs = zip(jax.tree.leaves(layer), jax.tree.leaves(old), strict=True)
        for x, y in pairs:
            np.testing.assert_array_equal(x[:count], y[:count])
            assert not x[count:].astype(jnp.float32).any()
    assert [sum(map(pool.is_published, range(3000))) for pool in second.pools] == counts
    saved = sum(file.stat().st_size for file in (tmp_path / "saved").rglob("*"))
    assert saved < sum(x.nbytes for x in jax.tree.leaves(kv)) / 3


def test_host_objects_survive_json():
    request = Request("r", [1], RICH, seed=2**63 - 1, max_len=9, stop_ids=frozenset({3, 1}))
    request.prefix_from = request
    request.logprobs = [np.array([1.5, -np.inf], np.float32)]
    structured = SamplingParams(
        structured_outputs=StructuredOutputsParams(json={"type": "object"}), stop=["a", "b"],
        output_kind=RequestOutputKind.FINAL_ONLY, extra_args={"heat": 0.1},
    )  # fmt: skip
    other = Request("s", [2], structured, seed=1, max_len=9, cache_salt=b"\x00\xff")
    value = {"a": (1, [None, {b"x": "y"}], {"z", "b"}), 7: request, "also": [request, other, 0.1]}
    back, requests = serialization.loads(serialization.dumps(value))
    first, second, tenth = back["also"]
    assert back["a"] == value["a"] and tenth == 0.1 and requests == [first, second]
    assert back[7] is first is first.prefix_from
    for made, given in [(first, request), (second, other)]:
        skip = dict(prefix_from=0, logprobs=0)
        assert vars(made) | skip == vars(given) | skip
    np.testing.assert_array_equal(first.logprobs[0], request.logprobs[0])
    with pytest.raises(TypeError, match="a object cannot be saved as JSON"):
        serialization.dumps([object()])
    with pytest.raises(ValueError, match="'Path' is no kind of object that is saved as JSON"):
        serialization.loads('{"root": {"Path": "/"}, "requests": []}')


WORDS = ["def add(a, b):\n", "import os\nfor x in", "class Stack:\n"]
CHOICE = ["yes indeed, it is so", "no, not at all, never"]


def asked() -> list[SamplingParams]:
    choice = StructuredOutputsParams(choice=CHOICE)
    return [
        SamplingParams(n=2, max_tokens=16, logprobs=1, stop=["return"], seed=3),
        SamplingParams(temperature=0.0, logprobs=1, max_tokens=20),
        SamplingParams(structured_outputs=choice, logprobs=1, max_tokens=20, seed=1),
    ]


def told(parts: Iterable[Any], texts: dict[tuple[str, int], str]) -> Iterator[Any]:
    """Adds what a stream tells to texts, by prompt and index; yields each part's end."""
    for part in parts:
        for output in part.outputs:
            key = part.request_id, output.index
            texts[key] = texts.get(key, "") + output.text
            yield key, output.finish_reason, output.cumulative_logprob


def test_a_stream_goes_on_where_it_was_saved(tmp_path, shallow):
    pytest.importorskip("llguidance")
    sizes: dict[str, Any] = SIZES | dict(max_num_seqs=4, decode_buckets=(4,))
    with LLM(shallow, **sizes) as first, LLM(shallow, **sizes) as second:
        texts, ends = {}, []
        parts = told(first.stream(WORDS, asked()), texts)
        ends += itertools.islice(parts, 13)
        first.save_state(tmp_path / "saved")
        later, rest = dict(texts), list(parts)
        assert later != texts
        assert list(told(second.restore_state(tmp_path / "saved"), later)) == rest
        assert later == texts and texts["2", 0] in CHOICE
        assert {key for key, reason, _ in ends + rest if reason} == texts.keys()
        with pytest.raises(ValueError, match="saved is there already"):
            first.save_state(tmp_path / "saved")
        assert next(second.stream(WORDS[0])).request_id == next(first.stream(WORDS[0])).request_id
    for use in (first.save_state, first.restore_state):
        with pytest.raises(RuntimeError, match="this engine is closed: build another one"):
            use(tmp_path / "late")


def test_a_grammar_that_cannot_resume_is_named():
    class Compiler:
        def submit(self, _: Any) -> Future:
            (future := Future()).set_exception(ValueError("too large"))
            return future

    request = Request("r", [1], asked()[2], seed=1, max_len=9)
    with pytest.raises(ValueError, match="request 'r' cannot resume: too large"):
        StructuredOutputManager(Compiler).resume([request])
    with pytest.raises(ValueError, match="structured_outputs needs the tokenizer"):
        StructuredOutputManager(None).resume([request])


def test_arrays_of_another_kind_are_refused(tmp_path):
    orbax_io.save(tmp_path / "saved", {"a": jnp.zeros(3), "b": [jnp.ones(2), jnp.ones(2)]})
    like = orbax_io.abstract({"a": jnp.zeros(4), "b": [jnp.ones(2)], "c": jnp.ones(2)})
    words = r"saved must hold the arrays of this model, 3 differ: a is float32\[3\], wanted "
    words += r"float32\[4\]; b.1 is float32\[2\], wanted none; c is missing, wanted float32\[2\]"
    with pytest.raises(ValueError, match=words):
        orbax_io.restore(tmp_path / "saved", like)
    with pytest.raises(FileNotFoundError, match="none must be a folder that arrays were saved in"):
        orbax_io.restore(tmp_path / "none", like)
