"""Requests of every rule on meshes of both kinds: preempted, and where programs fail."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrunner import SamplingParams
from jaxrunner.caches.interleave import Interleave
from jaxrunner.engine.engine import Engine
from jaxrunner.loading.weights import load_params
from jaxrunner.models.llama import llama
from jaxrunner.parallel.parallel_config import ParallelConfig
from tests.support import failing, features, small_checkpoint, tiny
from tests.support.crowd import answers, logprobs
from tests.support.failing import HOWS, nth

pytestmark = pytest.mark.slow
MODEL: dict[str, Any] = small_checkpoint.SETTINGS | dict(num_key_value_heads=2, num_hidden_layers=4)
TWO = ParallelConfig(tensor_parallel_size=2)
STAGES = ParallelConfig(pipeline_parallel_size=2)
SEVERAL = dict(num_decode_steps=2)  # which pipelines refuse
MESHES = {
    "tensor 2": (TWO, SEVERAL),
    "tensor 4": (ParallelConfig(4), {}),
    "tensor 8": (ParallelConfig(8), SEVERAL),
    "pipeline 4": (ParallelConfig(pipeline_parallel_size=4), {}),
    "tensor 2, pipeline 2": (ParallelConfig(2, 2), {}),
    "tensor 2, pipeline 4": (ParallelConfig(2, 4), {}),
    "tensor 4, context 2": (ParallelConfig(4, interleave=Interleave(2, 1)), {}),
    "tensor 8, context 4": (ParallelConfig(8, interleave=Interleave(4, 1)), SEVERAL),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return small_checkpoint.save(tmp_path_factory.mktemp("checkpoint"), **MODEL)


def engine(folder: Path, parallel: ParallelConfig, **sizes: Any) -> Engine:
    model, config = parallel.cut(llama, tiny.config(**MODEL))
    params = load_params(folder, model, config, dtype="float32", progress=False)
    made = tiny.engine_config(**sizes)
    return Engine(model, config, made, params, make_compiler=features.ParityCompiler)


@pytest.fixture(scope="module")
def wanted(folder):
    """Returns what one device answers that has room for all."""
    return answers(engine(folder, ParallelConfig(), num_blocks=60), 1)


@pytest.mark.devices(8)
@pytest.mark.parametrize(("parallel", "sizes"), MESHES.values(), ids=MESHES.keys())
def test_every_rule_gives_the_tokens_of_one_device(folder, wanted, parallel, sizes):
    num_blocks = 17 // parallel.interleave.parts
    e, aborted = engine(folder, parallel, num_blocks=num_blocks, **sizes), {3, 8, 9, 15, 20}
    e.warm_up(all_rules=True)
    e.runner.programs.strict = True  # nothing is compiled later
    got = answers(e, 1, aborted=aborted)
    assert e.scheduler.num_preemptions and any(r.num_cached_tokens for r in got)
    for one, want in zip(got, wanted, strict=True):
        tokens, cut = one.output_token_ids, one.finish_reason == "abort"
        assert tokens == (want.output_token_ids[: len(tokens)] if cut else want.output_token_ids)
        if not cut:
            assert (one.finish_reason, one.error) == (want.finish_reason, want.error)
            np.testing.assert_allclose(logprobs(one), logprobs(want), atol=2e-3)


FAULTS = [(TWO, name) for name in ("step", "forward", "sample", "admit")] + [
    (STAGES, name) for name in ("stage", "step", "forward", "sample", "receive", "admit")
]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [7] * 9, [8, 2, 8], [1, 2, 3]]
USUAL, RULED = SamplingParams(seed=3, max_tokens=5), SamplingParams(seed=5, max_tokens=5, top_k=9)


def run(e: Engine, turn: int) -> list[Any]:
    """Returns requests of both kinds of launches that have ended."""
    asked = [USUAL, RULED, SamplingParams(seed=4, max_tokens=5, logprobs=2, prompt_logprobs=1)]
    made = [e.add(f"{turn} {i}", p, asked[i % 3]) for i, p in enumerate(PROMPTS)]
    while e.has_unfinished:
        e.step()
    return made


@pytest.fixture(scope="module")
def meshes(folder) -> dict[ParallelConfig, tuple[Engine, list[list[int]]]]:
    """Returns an engine of each mesh, and what it answers."""
    made = {p: engine(folder, p, num_blocks=40, max_num_seqs=3) for p in (TWO, STAGES)}
    return {p: (e, [r.output_token_ids for r in run(e, -1)]) for p, e in made.items()}


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("parallel", "name"),
    FAULTS,
    ids=[f"{'tensor' if p is TWO else 'pipeline'}, {n}" for p, n in FAULTS],
)
def test_what_fails_on_a_mesh_ends_its_requests_alone(meshes, monkeypatch, parallel, name):
    """Those that are left have their tokens, and later ones all of theirs."""
    (e, want), turn = meshes[parallel], iter(range(99))
    for how in HOWS:
        with monkeypatch.context() as patch:
            failed = failing.programs(patch, nth(1, name), lambda how=how: how)
            got = run(e, next(turn))
        assert failed == [name], how
        assert {r.finish_reason for r in got} == {"error", "length"}
        for request, tokens in zip(got, want, strict=True):
            own = request.output_token_ids
            assert own == (tokens[: len(own)] if request.error else tokens)
        assert not e.status.ended
        assert [r.output_token_ids for r in run(e, next(turn))] == want
