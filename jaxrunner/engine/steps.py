"""The step loop of an engine: launches steps ahead, reads them in order, recovers from failures."""

import abc
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
import logging
import time
from typing import Any

import jax

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.engine.structured_output_manager import StructuredOutputManager
from jaxrunner.errors import (
    FATAL,
    NO_CHOICE,
    NO_NUMBER,
    StepTimeout,
    of_engine,
    of_hang,
    of_processes,
    of_step,
)
from jaxrunner.runner.at_exit import not_awaited_at_exit
from jaxrunner.runner.phases import phase
from jaxrunner.runner.routed_experts import RoutesReader
from jaxrunner.runner.step_handle import NewTokens, StepHandle, merged
from jaxrunner.scheduling.draft_policy import DraftPolicy
from jaxrunner.scheduling.ranks import ranks_of
from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.worker.expert_balance import ExpertBalance
from jaxrunner.worker.worker import Worker

logger = logging.getLogger(__name__)
POLL_S = 5e-5  # between polls of the replicas' devices, each of which has its next step queued
COMPILES_S = 1.0  # a longer launch compiles, and the time limits of other replicas' steps restart


class Steps(abc.ABC):
    """The part of `Engine` between its scheduler and its runner."""

    config: EngineConfig
    model_config: ModelConfig
    grammars: StructuredOutputManager

    def __init__(self, worker: Worker, scheduler: Scheduler) -> None:
        self.worker, self.runner, self.status = worker, worker.runner, worker.status
        self.scheduler, self.routes = scheduler, RoutesReader(self.runner)
        self.balance = ExpertBalance(self.runner)
        decode = [(b.num_rows, b.num_drafts) for b in self.runner.buckets if b.query_len]
        self._drafts = DraftPolicy(decode) if scheduler.adaptive else None
        self._in_flight: deque[tuple[SchedulerOutput, StepHandle]] = deque()
        # A step with grammars whose forward pass runs; it is sampled once all others are read.
        self._unsampled: SchedulerOutput | None = None
        self._gained: NewTokens = []  # read, and not yet returned
        self._nan_error: FloatingPointError | None = None  # raised by `take_gained`
        self._recovered: BaseException | None = None  # the last error that ended requests
        self.waiting_since_s = 0.0  # when the last step was launched or read, by `perf_counter`

    @property
    @abc.abstractmethod
    def unfinished(self) -> Mapping[str, Request]:
        """Requests that wait or run, by their ids."""

    @abc.abstractmethod
    def finish(self, request_ids: Iterable[str], reason: str, stop_reason: Any = None) -> None:
        """Ends requests at any phase; ids of ended requests are ignored."""

    def launch(self, *, block: bool = True) -> None:
        """Launches steps until `num_launches` are in flight or no token can be scheduled.

        block: waits for a grammar to be compiled if all requests wait for one.

        Raises:
          RuntimeError: the engine has ended; see `WorkerStatus`.
        """
        self.status.check()
        self.scheduler.outdate_prefixes(self.worker.cache_epoch, self.worker.lora_versions)
        self._take_compiled(block=block and not self.scheduler.has_unfinished)
        while self._unsampled is None and len(self._in_flight) < self.runner.program.num_launches:
            if not self._launch():
                break

    @property
    def oldest(self) -> StepHandle | None:
        """The step that `read` waits for."""
        return self._in_flight[0][1] if self._in_flight else None

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the oldest step exceeds `step_timeout_s`; None for no limit."""
        if (limit_s := self.config.step_timeout_s) is None:
            return None
        return limit_s - (time.perf_counter() - self.waiting_since_s)

    def read(self) -> None:
        """Reads the oldest step, if there is one."""
        if self._in_flight:
            self._read()
        if not self._in_flight:
            self._sample()

    def take_gained(self) -> NewTokens:
        """Returns the tokens read since the last call; raises as `Engine.step` for NaN."""
        if self._nan_error is not None:
            error, self._nan_error = self._nan_error, None
            raise error
        gained, self._gained = self._gained, []
        return merged(gained)

    def _take_compiled(self, *, block: bool) -> None:
        """Queues requests whose grammar is compiled, or reports that it failed."""
        for request in self.grammars.ready(block=block):
            if request.finish_reason is None:
                self.scheduler.add(request)
            else:
                self._gained.append((request, []))

    def _launch(self) -> bool:
        """Schedules a step and launches it. Returns whether it had tokens to compute."""
        n = 1 if self.runner.requests.need_single_steps else self.config.num_decode_steps
        if self._drafts is not None:
            num_rows = max(rank.num_running for rank in ranks_of(self.scheduler))
            K = self._drafts.choose(num_rows)
            waits = K and self.runner.would_wait(num_rows, K, n)
            self.scheduler.num_drafts = 0 if waits else K
        scheduled = self._schedule(n)
        self.routes.preempt(scheduled, self.unfinished)
        try:
            self.balance.step(scheduled.num_steps if scheduled.num_scheduled_tokens else 0)
            self.routes.give(scheduled)
            if self.grammars.is_due(scheduled.requests):
                # The forward pass needs no masks, so it runs before the previous tokens are read.
                self._dispatch(self.runner.execute_model, scheduled)
                self._unsampled = scheduled
            else:
                handle = self._dispatch(self.runner.step, scheduled)
                if scheduled.num_scheduled_tokens:
                    self._in_flight.append((scheduled, handle))
        except BaseException as error:
            while self._in_flight:  # launched before the failure, so their outputs may be intact
                self._read()
            if error is not self._recovered:  # not the launch of an earlier step, see `Launched`
                self._recover(scheduled, error)
            return False
        self.waiting_since_s = time.perf_counter()  # after the launch, which may have compiled
        return bool(scheduled.num_scheduled_tokens) if self._in_flight else self._sample()

    @phase("schedule")
    def _schedule(self, num_steps: int) -> SchedulerOutput:
        return self.scheduler.schedule(num_steps)

    @phase("dispatch")
    def _dispatch(self, launch: Callable[..., Any], of: Any) -> Any:
        return launch(of)

    def _sample(self) -> bool:
        """Samples the step that waits for its grammar masks. Returns whether there was one.

        A mask depends on all earlier tokens and on the drafts that the step verifies, so the steps
        before it have to be read first.
        """
        if self._unsampled is None:
            return False
        scheduled, self._unsampled = self._unsampled, None
        try:
            allowed, failed = self.grammars.bitmask(scheduled, self.model_config.vocab_size)
            self._end(scheduled.requests, failed)
            handle = self._dispatch(self.runner.sample_tokens, allowed)
        except BaseException as error:
            self._recover(scheduled, error)
            return False
        self._in_flight.append((scheduled, handle))
        self.waiting_since_s = time.perf_counter()
        return True

    def _read(self) -> None:
        """Reads the oldest step: updates the scheduler, grammars and drafts with its output."""
        scheduled, handle = self._in_flight.popleft()
        try:
            output = handle.get(self.time_left_s)
        except BaseException as error:
            self._recover(scheduled, error)
            return
        self.waiting_since_s = time.perf_counter()
        if self._drafts is not None:
            self._drafts.observe(scheduled, handle.launched_at, output.drafts)
        failed = output.failures(self.config.nan_policy)
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for req_id in failed if scheduled.num_steps == 1 else ():
            del sampled[req_id]  # of several steps, tokens before the failure count
        output.share_tokens(scheduled.requests)
        gained = self.scheduler.update(scheduled, sampled)
        output.share(gained)
        self.routes.end(request for request, _ in gained)
        self.routes.collect()
        self._gained += gained
        for request, tokens in gained:
            if request.grammar is not None and (reason := self.grammars.accept(request, tokens)):
                self.finish([request.request_id], reason)
        self._end(scheduled.requests, failed)

    def _end(self, requests: Mapping[str, Request], failed: Mapping[str, str]) -> None:
        """Ends requests, each with its error.

        Where no token was left and the grammar may end here, the request ends normally instead.
        """
        for req_id, error in failed.items():
            request = requests[req_id]
            if request.finish_reason is not None:
                continue  # an earlier one of several steps may have ended it
            if error == NO_CHOICE and self.grammars.may_end(request):
                self.finish([req_id], "stop")
            else:
                request.error = error
                self.finish([req_id], "error")
            self._gained.append((request, []))
            if error == NO_NUMBER and self.config.nan_policy == "raise":
                self._nan_error = FloatingPointError(f"request {req_id!r}: {error}")

    def _recover(self, scheduled: SchedulerOutput, error: BaseException) -> None:
        """Ends the requests of a step that failed; all others are computed anew from their tokens.

        Ends the engine where its device or processes cannot go on.

        Raises:
          BaseException: `error`, if it is one of `errors.FATAL` or programs are `strict`.
        """
        logger.error("a step failed", exc_info=error)
        self._recovered = error
        self._in_flight.clear()
        self._unsampled = None
        self._end(scheduled.requests, dict.fromkeys(scheduled.requests, of_step(error)))
        self.scheduler.restart()
        ended = self._why_ended(error)
        try:
            if not ended:
                self.runner.restart()
                self.routes.forget()
        except Exception as cause:
            ended = of_engine(error, cause)
        if ended:
            self.status.ended = ended
            left = dict(self.unfinished)
            self._end(left, dict.fromkeys(left, ended))
        if self.runner.programs.strict or isinstance(error, FATAL):
            raise error

    def _why_ended(self, error: BaseException) -> str:
        """Returns why no step can follow a failed one, as a sentence; "" where one can."""
        if isinstance(error, StepTimeout):
            words = of_hang(self.config.step_timeout_s)
        elif self.runner.program.is_shared and isinstance(error, jax.errors.JaxRuntimeError):
            words = of_processes(error)  # one may have died, or they run different steps now
        else:
            return ""
        not_awaited_at_exit(self.runner)
        return words


def launch_all(engines: Sequence[Steps]) -> None:
    """Launches the steps of all engines, without waiting for grammars."""
    start_s = time.perf_counter()
    for engine in engines:
        engine.launch(block=False)
    if time.perf_counter() - start_s > COMPILES_S:
        for engine in engines:
            engine.waiting_since_s = time.perf_counter()


def wait_for_one(busy: Sequence[Steps]) -> Sequence[Steps]:
    """Waits until the oldest step of an engine is done, or has exceeded its time limit.

    Returns the engines whose oldest step is to be read.
    """
    if len(busy) < 2:
        return busy
    while True:
        done = [e for e in busy if e.oldest is None or e.oldest.is_ready or _is_late(e)]
        if done:
            return done
        time.sleep(POLL_S)


def _is_late(engine: Steps) -> bool:
    return (left_s := engine.time_left_s) is not None and left_s <= 0
