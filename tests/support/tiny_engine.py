"""Engines of the tiny decoder, requests for them, and loops that run these to their end."""

from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from tests.support import tiny

PROMPTS = [
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9],
    [9, 2, 6],
    [5, 3, 5, 8, 9, 7, 9],
    [3, 1, 4, 1, 5, 9, 2, 6, 7, 7],
    [60],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 1, 2, 3, 4, 5, 6, 7, 8, 9],
]
KINDS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
    "sampled": SamplingParams(temperature=1.0, max_tokens=12),
    "filtered": SamplingParams(temperature=1.3, top_k=9, top_p=0.8, min_p=0.01, max_tokens=12),
}


def params_of(kind: str, i: int) -> SamplingParams:
    """Returns parameters of the i-th request of a kind, of a seed and a length of its own."""
    changes: dict[str, Any] = dict(seed=i, max_tokens=9 + i, min_tokens=2 * (i % 2))
    base = KINDS[kind]
    return SamplingParams(
        temperature=base.temperature, top_k=base.top_k, top_p=base.top_p, min_p=base.min_p,
        stop_token_ids=[7, 30], **changes,
    )  # fmt: skip


def engine(**changes) -> Engine:
    """Returns an engine of the tiny decoder, with `changes` of its sizes."""
    config, params = tiny.model_and_params()
    return Engine(llama, config, tiny.engine_config(**changes), params)


def run(engine: Engine, prompts, params, order=None) -> list[list[int]]:
    """Returns the output tokens of each prompt, added in `order`."""
    requests = {}
    for i in order if order is not None else range(len(prompts)):
        requests[i] = engine.add(f"{i}", prompts[i], params[i], priority=i % 2)
    drain(engine)
    return [requests[i].output_token_ids for i in range(len(prompts))]


def drain(engine: Engine) -> None:
    """Steps until all requests have ended; each pool's blocks are checked at each step."""
    while engine.has_unfinished:
        engine.step()
        for pool in engine.pools:
            pool.check(r.blocks[pool.group] for r in engine.scheduler.running)
    while engine.step():
        pass
    assert [p.num_free for p in engine.pools] == [engine.config.num_blocks] * len(engine.pools)


def begin(e: Engine, steps: int = 5) -> dict[str, Request]:
    """Adds requests, greedy and sampled, some with one beginning, and steps a few times."""
    e.add("early", PROMPTS[5], SamplingParams(temperature=0.0, max_tokens=2))
    drain(e)  # its blocks are cached
    kinds = ["greedy", "sampled", "filtered"] * 2
    params = [params_of(kind, i) for i, kind in enumerate(kinds)]
    params[2] = SamplingParams(max_tokens=14)  # its seed is the engine's
    added = [e.add(str(i), p, params[i], priority=i % 2) for i, p in enumerate(PROMPTS)]
    added.append(e.add("late", PROMPTS[5], params_of("sampled", 6), prefix_from=added[5]))
    for _ in range(steps):
        e.step()
    return {r.request_id: r for r in added if r.finish_reason is None}
