"""Small schedulers and requests, for tests of the scheduler."""

from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.caches.cache_group import CacheGroup
from jaxrunner.caches.full import FullAttention
from jaxrunner.caches.state import RecurrentState
from jaxrunner.caches.window import SlidingWindow
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.state_pool import make_pools


def cache_group(block_size: int, window: int | None = None, num_blocks: int = 0) -> CacheGroup:
    """Returns a group whose pool is made elsewhere, of as many blocks as others where it is 0."""
    kind = FullAttention() if window is None else SlidingWindow(window)
    return CacheGroup(kind, (), block_size, num_blocks)


def state_group(interval: int, num_blocks: int) -> CacheGroup:
    """Returns a group of states with a checkpoint every `interval` tokens."""
    return CacheGroup(RecurrentState(taps=1, channels=1), (), interval, num_blocks)


def make_hybrid(num_blocks=40, *, interval=8, num_states=9, **changes):
    """Returns a scheduler of layers that attend and of layers with states, and both pools."""
    kwargs: dict[str, Any] = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    groups = [cache_group(4, num_blocks=num_blocks), state_group(interval, num_states)]
    pools = make_pools(groups, enable_caching=True)
    return Scheduler(groups, pools, **(kwargs | changes)), pools


def make(num_blocks=40, *, sizes=(4,), windows=(None,), **changes):
    """Returns a scheduler and its pools, one for each group."""
    kwargs: dict[str, Any] = dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=32)
    groups = [cache_group(*one) for one in zip(sizes, windows, strict=True)]
    pools = [BlockPool(num_blocks, size, g) for g, size in enumerate(sizes)]
    return Scheduler(groups, pools, **(kwargs | changes)), pools


def new(request_id, prompt, max_tokens=8, *, min_tokens=0, stops=(), eos=(), **kwargs):
    """Returns a request; an integer prompt is its length, of tokens that no other id shares."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + ord(request_id)) + i for i in range(prompt)]
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=SamplingParams(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=list(stops)
        ),
        seed=0,
        max_len=len(prompt) + max_tokens,
        stop_ids=frozenset(stops) | frozenset(eos),
        **kwargs,
    )


def step(scheduler, token=5):
    """Schedules a step and reads it at once; returns its output."""
    output = scheduler.schedule()
    due = [r for r in output.requests.values() if r.num_in_flight]
    scheduler.update(output, {r.request_id: [token] for r in due})
    return output


def check(scheduler, pools):
    for g, pool in enumerate(pools):
        pool.check([request.blocks[g] for request in scheduler.running])
