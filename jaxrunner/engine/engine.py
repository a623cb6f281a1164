"""Tokens in, tokens out, for many requests at once: schedules, launches, reads, finishes.

engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
while engine.has_unfinished:
    for request, new_token_ids in engine.step(): ...
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
from typing import Any

import numpy as np

from jaxrunner.api.arguments import forwarded
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.engine.interrupts import deferred
from jaxrunner.engine.make_scheduler import make_scheduler
from jaxrunner.engine.request_check import check_among, check_ids, check_reason, new_request
from jaxrunner.engine.steps import Steps
from jaxrunner.engine.structured_output_manager import StructuredOutputManager
from jaxrunner.lora.lora_request import LoRARequest, check_lora_request
from jaxrunner.model import Model
from jaxrunner.programs.build import build
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.phases import phase
from jaxrunner.runner.step_handle import NewTokens
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.stateful import Stateful
from jaxrunner.worker.worker import Worker


class Engine(Steps, Stateful):
    """Drives a scheduler and a worker's runner, `async_depth` steps ahead of what it has read."""

    SAVED = ("_seeds",)  # attributes that a snapshot has

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        config: EngineConfig,
        params: Any,
        *,
        make_compiler: Callable[[], Any] | None = None,
        **kwargs: Any,
    ):
        """Makes an engine, and its worker, for weights that are loaded; see `of` for others.

        params: the weights, which `close` leaves in place.
        make_compiler: returns a `GrammarCompiler`; called when a request first has a grammar.
        `kwargs` go to `programs.build.build`, whose errors are raised.
        """
        built = build(model, model_config, config, params, **kwargs)
        self._set_up(Worker.of(ModelRunner(built, params, trusted=True)), make_compiler)

    @classmethod
    def of(cls, worker: Worker, *, make_compiler: Callable[[], Any] | None = None) -> "Engine":
        """Returns the engine of a worker that has a runner; its weights may be loaded later."""
        engine = cls.__new__(cls)
        engine._set_up(worker, make_compiler)
        return engine

    def _set_up(self, worker: Worker, make_compiler: Callable[[], Any] | None) -> None:
        program = worker.runner.program
        self.config, self.model_config = program.engine, program.config
        adapters = worker.runner.adapters
        self.pools, scheduler = make_scheduler(program, adapters and adapters.pinned)
        super().__init__(worker, scheduler)
        self.grammars = StructuredOutputManager(make_compiler, in_step=program.is_shared)
        self._seeds = np.random.default_rng(self.config.seed)
        # Bound to the queues: a reference to the engine, which holds the worker, would be a cycle.
        worker.lora_users = functools.partial(_adapters_of, scheduler, self.grammars)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
        prompt_logprobs_start: int | None = None,
        prefix_from: Request | None = None,
        cache_salt: str | None = None,
        routed_experts: Any = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Queues a request.

        eos_token_ids: ids that end it, unless ignored; the first has no `stop_reason`.
        prompt_logprobs_start: position of the first prompt token with logprobs; 1 where None.
        prefix_from: an unfinished request with the same prompt; this one waits until it can
            share the blocks that the other computes.
        cache_salt: the request shares cached blocks only with requests of the same salt.
        routed_experts: experts that compute the prompt, int16 [tokens, layers, k]; see
            `given_routes.check_given`.
        lora_request: its adapter, which is read unless it is loaded.

        Raises:
          TypeError, ValueError: an argument is bad, or the id is in use; names it.
          RuntimeError: the engine sleeps, or has ended; see `WorkerStatus`.
        """
        self.status.check_awake()
        adapter = check_lora_request(lora_request)
        request = new_request(
            request_id, prompt_token_ids, params, of=self.runner.program,
            eos_token_ids=eos_token_ids, priority=priority, prefix_from=prefix_from,
            prompt_logprobs_start=prompt_logprobs_start, cache_salt=cache_salt,
            routed_experts=routed_experts,
            lora_id=0 if adapter is None else adapter.lora_int_id,
        )  # fmt: skip
        check_among(request, self.unfinished)
        self.grammars.check(request.params)
        self.worker.take_lora(adapter)  # once nothing else can refuse the request
        self.queue(request)
        return request

    def queue(self, request: Request) -> None:
        """Queues what `new_request` has made and `check_among` has passed."""
        has_grammar = request.params.structured_outputs is not None
        (self.grammars.submit if has_grammar else self.scheduler.add)(request)
        # Drawn last: a request that is refused must not change the seeds of later ones.
        if request.params.seed is None:
            request.seed = int(self._seeds.integers(2**63))
        if request.prefix_from is not None:
            request.prefix_from.publishes_prefix = True

    def begin(self) -> None:
        """Launches steps as `launch` does, and waits for no grammar."""
        self.launch(block=False)

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.has_unfinished or self.grammars.num_waiting > 0

    @property
    def unfinished(self) -> Mapping[str, Request]:
        """Requests that wait or run, by their ids."""
        return ChainMap(self.scheduler.requests, self.grammars.requests)

    @phase("read")
    @deferred
    def step(self) -> NewTokens:
        """Launches steps, up to `async_depth` ahead, then reads the oldest.

        Returns the requests that gained tokens or ended, with their new tokens. The requests of a
        step that fails end with its error; all others go on.

        Raises:
          RuntimeError: the engine has ended; see `WorkerStatus`.
          FloatingPointError: the model gave NaN or infinity and `nan_policy` is "raise". Only the
            request that it names has ended; the next call returns the tokens of all others.
        """
        self.launch()
        self.read()
        return self.take_gained()

    @deferred
    def drain(self) -> NewTokens:
        """Reads all launched steps and waits for grammars; launches none. Otherwise as `step`."""
        self.scheduler.outdate_prefixes(self.worker.cache_epoch, self.worker.lora_versions)
        while self._in_flight:
            self.read()
        while self.grammars.num_waiting:
            self._take_compiled(block=True)
        self.routes.collect(wait=True)
        return self.take_gained()

    def finish(self, request_ids: Iterable[str], reason: str, stop_reason: Any = None) -> None:
        """Ends waiting or running requests; ids of ended requests are ignored.

        Raises:
          TypeError, ValueError: an id is no string, or `reason` is unknown.
        """
        request_ids = check_ids(request_ids)
        check_reason(reason, stop_reason)
        self.grammars.drop(request_ids, reason, stop_reason)
        live = [self.scheduler.requests.get(request_id) for request_id in request_ids]
        self.scheduler.finish(request_ids, reason, stop_reason)
        self.routes.end(request for request in live if request is not None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with the reason "abort"; raises as `finish`."""
        self.finish(request_ids, "abort")

    warm_up = forwarded("runner", ModelRunner.warm_up)
    update_params = forwarded("worker", Worker.update_params)

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.worker.weights_version

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes. Returns False, and changes nothing, while a request runs."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Aborts all requests and frees the device memory, but for weights that the caller gave.

        May be called twice; in a forked process it does nothing.
        """
        if self.status.is_foreign:
            return
        self.status.ended = "this engine is closed: build another one"
        self.abort(list(self.unfinished))
        self._in_flight.clear()
        self.grammars.close()
        self.worker.close()


def _adapters_of(*queues: Scheduler | StructuredOutputManager) -> set[int]:
    """Returns the adapters of unfinished requests."""
    return {request.lora_id for queue in queues for request in queue.requests.values()}
