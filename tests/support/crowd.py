"""Requests that preempt each other and use every feature of sampling, and an engine for them."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.qwen2 import qwen2
from jaxrunner.parallel.pipeline import deal, homes
from jaxrunner.scheduling.request import Request
from jaxrunner.speculators.speculator import Speculator
from tests.support import tiny
from tests.support.features import ParityCompiler, random_params

QWEN: dict[str, Any] = dict(
    architectures=["Qwen2ForCausalLM"], num_hidden_layers=3, use_sliding_window=True,
    sliding_window=6, max_window_layers=1, tie_word_embeddings=True,
)  # fmt: skip
NUM_REQUESTS = 24


def engine(weights, num: int = 1, speculator: Speculator | None = None, **sizes: Any) -> Engine:
    """Returns the engine of a model with windows in its later layers, in `num` stages."""
    config, params = weights
    model = qwen2._replace(speculator=speculator)
    if num > 1:
        model, config = deal(model, config, num)
        params = jax.tree.map(jax.device_put, params, homes(config))
    sizes = dict(num_blocks=17) | sizes
    return Engine(model, config, tiny.engine_config(**sizes), params, make_compiler=ParityCompiler)


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


def answers(e: Engine, seed: int, *, aborted: Iterable[int] = (), alone: bool = False):
    """Returns what requests get that come a few at a time, and of those that end early too.

    alone: each comes when the one before it has ended.
    """
    asked, rng, made = requests(seed), np.random.default_rng(seed), []
    while len(made) < len(asked) or e.has_unfinished:
        for _ in range(not e.has_unfinished if alone else rng.integers(0, 4)):
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
