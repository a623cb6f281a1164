"""Tokens in, tokens out, for many requests at once: schedules, launches, reads, finishes.

engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
while engine.has_unfinished:
    for request, new_token_ids in engine.step(): ...
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrunner.block_pool import BlockPool
from jaxrunner.cache_groups import CacheGroup
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.layout import MAX_STOP_IDS
from jaxrunner.model import Model
from jaxrunner.params import SamplingParams
from jaxrunner.prompts import check_prompt
from jaxrunner.request import Request, SchedulerOutput
from jaxrunner.runner import ModelRunner, StepHandle
from jaxrunner.scheduler import Scheduler


class Engine:
    """Drives a scheduler and a runner, `async_depth` steps ahead of what it has read."""

    def __init__(
        self, model: Model, model_config: ModelConfig, config: EngineConfig, params: Any, **kwargs
    ):
        """Builds an engine; `kwargs` go to `ModelRunner`."""
        self.config, self.model_config = config, model_config
        groups = [CacheGroup(config.block_size, window) for window in model_config.groups]
        self.pools = [
            BlockPool(config.num_blocks, config.block_size, g, config.enable_prefix_caching)
            for g in range(len(groups))
        ]
        self.scheduler = Scheduler(
            groups,
            self.pools,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            policy=config.policy,
        )
        self.runner = ModelRunner(model, model_config, config, params, **kwargs)
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._seeds = np.random.default_rng(config.seed)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
    ) -> Request:
        """Queues a request.

        Raises:
          TypeError, ValueError: a bad prompt or parameter, or an id that is in use; names it.
        """
        vocab_size, max_len = self.model_config.vocab_size, self.config.max_model_len
        check_prompt(prompt_token_ids, vocab_size, max_len)
        params.check(vocab_size)
        wanted = max_len if params.max_tokens is None else params.max_tokens
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if len(stops) > MAX_STOP_IDS:
            raise ValueError(
                f"stop_token_ids and EOS are {len(stops)} ids, a request may have {MAX_STOP_IDS}: "
                "stop on fewer"
            )
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=seed,
            max_len=min(len(prompt_token_ids) + wanted, max_len),
            stop_ids=frozenset(stops),
            priority=priority,
            cache_salt=self.model_config.cache_salt(len(prompt_token_ids)),
        )
        self.scheduler.add(request)
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.has_unfinished

    def step(self) -> list[tuple[Request, list[int]]]:
        """Launches what can be launched, reads the oldest step.

        Returns the requests that gained tokens or ended, with their new tokens.
        """
        while len(self._in_flight) < self.config.async_depth and self._launch():
            pass
        if not self._in_flight:
            return []
        scheduled, handle = self._in_flight.popleft()
        output = handle.get()
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        return self.scheduler.update(scheduled, sampled)

    def _launch(self) -> bool:
        scheduled = self.scheduler.schedule()
        handle = self.runner.step(scheduled)
        if scheduled.num_scheduled_tokens:
            self._in_flight.append((scheduled, handle))
        return bool(scheduled.num_scheduled_tokens)

    def abort(self, request_ids: Iterable[str], reason: str = "abort") -> None:
        """Ends requests at any phase; ids of ended requests are ignored."""
        self.scheduler.finish(list(request_ids), reason)

    def warm_up(self, *, progress: bool = False) -> None:
        """Compiles every program that `step` can need."""
        self.runner.warm_up(progress=progress)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Gives the device memory of the state back; the weights are the caller's."""
        self._in_flight.clear()
        for array in jax.tree.leaves(self.runner.state):
            array.delete()
