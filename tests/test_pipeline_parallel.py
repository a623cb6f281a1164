"""Models in stages, on fake devices of a CPU: tokens are those of one device."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LLM, SamplingParams, embedded
from jaxrunner.api.sampling_params import StructuredOutputsParams
from jaxrunner.engine.engine import Engine
from jaxrunner.heads.head import Head
from jaxrunner.models.llama import llama
from jaxrunner.models.qwen2 import qwen2
from jaxrunner.parallel.pipeline import deal, homes
from jaxrunner.runner.program_table import ProgramTable
from jaxrunner.scheduling.request import Request
from jaxrunner.worker.worker import Worker
from tests.support import tiny
from tests.support.features import ParityCompiler, random_params

QWEN: dict[str, Any] = dict(
    architectures=["Qwen2ForCausalLM"], num_hidden_layers=5, use_sliding_window=True,
    sliding_window=6, max_window_layers=2, tie_word_embeddings=True,
)  # fmt: skip
LLM_SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,),
    max_model_len=128, dtype="float32", warm_up=False, use_tqdm=False,
)  # fmt: skip
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def weights():
    config = tiny.config(**QWEN)
    return config, tiny.random_params(config, seed=5)


def engine(weights, num: int = 1, **sizes: Any) -> Engine:
    """Returns the engine of a model with windows in its later layers, in `num` stages."""
    config, params = weights
    model = qwen2
    if num > 1:
        model, config = deal(model, config, num)
        params = jax.tree.map(jax.device_put, params, homes(config))
    sizes = dict(num_blocks=17) | sizes
    return Engine(
        model, config, tiny.engine_config(**sizes), params, make_compiler=ParityCompiler
    )


def requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Returns prompts, many with a common beginning, that use every feature of sampling."""
    rng = np.random.default_rng(seed)
    bases = [rng.integers(0, 60, 18).tolist() for _ in range(2)]
    return [
        (
            bases[i % 2][: rng.integers(0, 19)] + rng.integers(0, 60, rng.integers(1, 12)).tolist(),
            random_params(rng),
        )
        for i in range(NUM_REQUESTS)
    ]


def answers(e: Engine, seed: int, *, aborted: set[int] = frozenset()):
    """Returns what requests get that come a few at a time, and of those that end early too."""
    asked, rng, made = requests(seed), np.random.default_rng(seed), []
    while len(made) < len(asked) or e.has_unfinished:
        for _ in range(rng.integers(0, 4)):
            if len(made) < len(asked):
                made.append(e.add(f"{len(made)}", *asked[len(made)], eos_token_ids=[60]))
        e.step()
        e.abort([f"{i}" for i in aborted if i < len(made) and rng.random() < 0.3])
    return made


def logprobs(request: Request) -> list[float]:
    """Returns the logprob of each token of which it was asked for, of the prompt too."""
    told = [float(x) for part in request.logprobs for x in part.value]
    by_position = {  # what was preempted is told twice
        int(at): float(x)
        for positions, part in request.prompt_logprobs
        for at, x in zip(positions, part.value, strict=True)
    }
    return told + [by_position[at] for at in sorted(by_position)]


@pytest.fixture(scope="module")
def wanted(weights):
    """Returns what one device answers, without neighbours that would be in the way."""
    return answers(engine(weights, num_blocks=60), 1)


@pytest.mark.parametrize("num", [2, 4])
def test_tokens_are_those_of_one_device(weights, wanted, num):
    e, aborted = engine(weights, num), {3, 8, 9, 15, 20}
    got = answers(e, 1, aborted=aborted)
    assert e.scheduler.num_preemptions and any(r.num_cached_tokens for r in got)
    for one, want in zip(got, wanted, strict=True):
        tokens = one.output_token_ids
        cut = one.finish_reason == "abort"
        assert tokens == (want.output_token_ids[: len(tokens)] if cut else want.output_token_ids)
        if not cut:
            np.testing.assert_allclose(logprobs(one), logprobs(want), atol=2e-3)
