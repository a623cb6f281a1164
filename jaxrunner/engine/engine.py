"""Tokens in, tokens out, for many requests at once: schedules, launches, reads, finishes.

engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
while engine.has_unfinished:
    for request, new_token_ids in engine.step(): ...
"""

from collections import ChainMap, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
import logging
from typing import Any

import numpy as np

from jaxrunner.api.arguments import forwarded
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.engine.interrupts import deferred
from jaxrunner.engine.make_scheduler import make_scheduler
from jaxrunner.engine.request_check import check_among, check_ids, check_reason, new_request
from jaxrunner.engine.structured_output_manager import StructuredOutputManager
from jaxrunner.errors import FATAL, NO_CHOICE, NO_NUMBER, of_engine, of_step
from jaxrunner.model import Model
from jaxrunner.runner.build import build
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.step_handle import NewTokens, StepHandle, merged
from jaxrunner.scheduling.draft_policy import DraftPolicy
from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.worker.worker import Worker

logger = logging.getLogger(__name__)


class Engine:
    """Drives a scheduler and a worker's runner, `async_depth` steps ahead of what it has read."""

    SAVED = ("_seeds",)  # in a snapshot

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
        """An engine of weights that are there; `of` has those that a worker loads.

        make_compiler: returns a `GrammarCompiler`, once a request wants structured outputs.
        `kwargs` go to `build`.
        """
        built = build(model, model_config, config, params, **kwargs)
        self._set_up(Worker.of(ModelRunner(built, params, trusted=True)), make_compiler)

    @classmethod
    def of(cls, worker: Worker, *, make_compiler: Callable[[], Any] | None = None) -> "Engine":
        """Returns the engine of a worker that has its runner; the weights may still be to come."""
        engine = cls.__new__(cls)
        engine._set_up(worker, make_compiler)
        return engine

    def _set_up(self, worker: Worker, make_compiler: Callable[[], Any] | None) -> None:
        self.worker, self.runner, self.status = worker, worker.runner, worker.status
        program = self.runner.program
        self.config, self.model_config = program.engine, program.config
        self.pools, self.scheduler = make_scheduler(program)
        decode = [(b.num_rows, b.num_drafts) for b in self.runner.buckets if b.query_len]
        self._drafts = DraftPolicy(decode) if self.scheduler.adaptive else None
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        self._gained: NewTokens = []  # read, and not yet returned
        self.grammars = StructuredOutputManager(make_compiler)
        self._seeds = np.random.default_rng(self.config.seed)
        self._alarm: FloatingPointError | None = None  # for the end of a step

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        eos_token_ids: Iterable[int] = (),
        priority: int = 0,
        prompt_logprobs_start: int | None = None,
        leader: Request | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Queues a request.

        eos_token_ids: ids that end it, unless ignored; the first has no `stop_reason`.
        prompt_logprobs_start: position of the first prompt token with logprobs; 1 where None.
        leader: an unfinished request with this prompt, which is to be computed first and shared.
        cache_salt: it shares cached blocks only with requests of the same.

        Raises:
          TypeError, ValueError: a bad argument, or an id that is in use; names it.
          RuntimeError: the engine sleeps, or has ended; see `WorkerStatus`.
        """
        self.status.check_awake()
        request = new_request(
            request_id, prompt_token_ids, params, of=self.runner.program,
            eos_token_ids=eos_token_ids, priority=priority, leader=leader,
            prompt_logprobs_start=prompt_logprobs_start, cache_salt=cache_salt,
        )  # fmt: skip
        check_among(request, self._unfinished)
        ruled = params.structured_outputs is not None
        (self.grammars.submit if ruled else self.scheduler.add)(request)
        # Nothing refuses it any more.
        if params.seed is None:
            request.seed = int(self._seeds.integers(2**63))
        if leader is not None:
            leader.leads = True
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self.scheduler.has_unfinished or self.grammars.num_waiting > 0

    @property
    def _unfinished(self) -> Mapping[str, Request]:
        return ChainMap(self.scheduler.requests, self.grammars.requests)

    @deferred
    def step(self) -> NewTokens:
        """Launches what can be launched, reads the oldest step.

        Returns the requests that gained tokens or ended, with their new tokens. Where a step fails
        its requests end with the error, and the others go on.

        Raises:
          RuntimeError: the engine has ended; see `WorkerStatus`.
          FloatingPointError: the model gave NaN or infinity and `nan_policy` is "raise". Nothing
            is lost: the request that it names has ended, the next step goes on.
        """
        self.status.check()
        self.scheduler.outdate_prefixes(self.worker.cache_epoch)
        self._take_compiled(block=not self.scheduler.has_unfinished)
        for _ in range(self.runner.program.num_launches - len(self._in_flight)):
            if not self._launch():
                break
        if self._in_flight:
            self._read()
        return self._take_gained()

    @deferred
    def drain(self) -> NewTokens:
        """Reads what is in flight, waits for grammars, launches nothing. As `step` otherwise."""
        self.scheduler.outdate_prefixes(self.worker.cache_epoch)
        while self._in_flight:
            self._read()
        while self.grammars.num_waiting:
            self._take_compiled(block=True)
        return self._take_gained()

    def _take_gained(self) -> NewTokens:
        if self._alarm is not None:
            alarm, self._alarm = self._alarm, None
            raise alarm
        gained, self._gained = self._gained, []
        return merged(gained)

    def _take_compiled(self, *, block: bool) -> None:
        """Queues requests whose grammar is there."""
        for request in self.grammars.ready(block=block):
            if request.finish_reason is None:
                self.scheduler.add(request)
            else:
                self._gained.append((request, []))

    def _launch(self) -> bool:
        """Schedules a step and launches it. Returns whether there was one."""
        n = 1 if self.runner.requests.need_single_steps else self.config.num_decode_steps
        if self._drafts is not None:
            num_rows = self.scheduler.num_running
            K = self._drafts.choose(num_rows)
            waits = K and self.runner.would_wait(num_rows, K, n)
            self.scheduler.num_drafts = 0 if waits else K
        scheduled = self.scheduler.schedule(n)
        try:
            handle = self._start(scheduled)
        except BaseException as error:
            while self._in_flight:  # launched before it, so they may be whole
                self._read()
            self._lose(scheduled, error)
            return False
        if scheduled.num_scheduled_tokens:
            self._in_flight.append((scheduled, handle))
        return bool(scheduled.num_scheduled_tokens)

    def _start(self, scheduled: SchedulerOutput) -> StepHandle:
        """Launches a step: one with a grammar in two parts, the steps before it read in between.

        A mask needs all tokens before, and drafts that the step verifies, which the step before
        proposed as it ended. The forward pass needs neither, so it runs while the host reads them
        and builds the masks.
        """
        if not self.grammars.is_due(scheduled.requests):
            return self.runner.step(scheduled)
        self.runner.execute_model(scheduled)
        while self._in_flight:
            self._read()
        allowed, failed = self.grammars.bitmask(scheduled, self.model_config.vocab_size)
        self._end(scheduled.requests, failed)
        return self.runner.sample_tokens(allowed)

    def _read(self) -> None:
        """Reads the oldest step, and tells the scheduler of it."""
        scheduled, handle = self._in_flight.popleft()
        try:
            output = handle.get()
        except BaseException as error:
            self._lose(scheduled, error)
            return
        if self._drafts is not None:
            self._drafts.observe(scheduled, handle.launched_at, output.drafts)
        failed = output.failures(self.config.nan_policy)
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for req_id in failed if scheduled.num_steps == 1 else ():
            del sampled[req_id]  # of several, those count that came before
        output.share_prompt_logprobs(scheduled.requests)
        gained = self.scheduler.update(scheduled, sampled)
        output.share(gained)
        self._gained += gained
        for request, tokens in gained:
            if request.grammar is not None and (reason := self.grammars.accept(request, tokens)):
                self.finish([request.request_id], reason)
        self._end(scheduled.requests, failed)

    def _end(self, requests: Mapping[str, Request], failed: Mapping[str, str]) -> None:
        """Ends requests with errors of their own; a grammar that may end here ends well."""
        for req_id, error in failed.items():
            request = requests[req_id]
            if request.finish_reason is not None:
                continue  # of several steps, one before may have ended it
            if error == NO_CHOICE and self.grammars.may_end(request):
                self.finish([req_id], "stop")
            else:
                request.error = error
                self.finish([req_id], "error")
            self._gained.append((request, []))
            if error == NO_NUMBER and self.config.nan_policy == "raise":
                self._alarm = FloatingPointError(f"request {req_id!r}: {error}")

    def _lose(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        """Ends the requests of a step that failed; the others start again, from their tokens."""
        logger.error("a step failed", exc_info=error)
        self._in_flight.clear()
        self._end(scheduled.requests, dict.fromkeys(scheduled.requests, of_step(error)))
        self.scheduler.restart()
        try:
            self.runner.restart()
        except Exception as cause:
            self.status.ended = of_engine(error, cause)
            left = dict(self._unfinished)
            self._end(left, dict.fromkeys(left, self.status.ended))
        if self.runner.programs.strict or isinstance(error, FATAL):
            raise error

    def finish(self, request_ids: Iterable[str], reason: str, stop_reason: Any = None) -> None:
        """Ends requests at any phase; ids of ended requests are ignored.

        Raises:
          TypeError, ValueError: an id is no string, or there is no such reason.
        """
        request_ids = check_ids(request_ids)
        check_reason(reason, stop_reason)
        self.grammars.drop(request_ids, reason, stop_reason)
        self.scheduler.finish(request_ids, reason, stop_reason)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests that nobody waits for any more; raises as `finish`."""
        self.finish(request_ids, "abort")

    warm_up = forwarded("runner", ModelRunner.warm_up)
    update_params = forwarded("worker", Worker.update_params)

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.worker.weights_version

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs."""
        return self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Gives the device memory back; weights that the caller gave stay.

        Requests are aborted. May be called twice; in a process forked off it does nothing.
        """
        if self.status.is_foreign:
            return
        self.status.ended = "this engine is closed: build another one"
        self.abort(list(self._unfinished))
        self._in_flight.clear()
        self.grammars.close()
        self.worker.close()
