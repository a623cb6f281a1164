"""Compiles the grammars of requests, and makes the masks of running ones. Knows no JAX."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.errors import of_foreign_code
from jaxrunner.scheduling.request import GrammarOutput, Request, SchedulerOutput, Status

FAILED = "structured_outputs: the grammar failed"


class StructuredOutputManager:
    """Compiles the grammars of requests, and runs the compiled ones, each `Request.grammar`."""

    def __init__(self, make_compiler: Callable[[], Any] | None, *, in_step: bool = False):
        """make_compiler: returns a `GrammarCompiler`; called once, when a request needs it.
        in_step: whether other processes schedule the same requests, so that `ready` waits for all.
        """
        self._in_step = in_step
        self.make_compiler = make_compiler
        self._compiler: Any = None
        self.requests: dict[str, Request] = {}  # whose grammar is not compiled yet
        self._futures: dict[str, Future] = {}

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not compiled yet."""
        return len(self.requests)

    def check(self, params: SamplingParams) -> None:
        """Makes the compiler, if it is the first grammar.

        Raises:
          ValueError: there is no tokenizer to compile it for, or llguidance is not installed.
        """
        if params.structured_outputs is None or self._compiler is not None:
            return
        if self.make_compiler is None:
            raise ValueError(
                "structured_outputs needs the tokenizer of the model: leave skip_tokenizer_init "
                "out, or give the engine a GrammarCompiler"
            )
        self._compiler = self._made_compiler(self.make_compiler)

    def submit(self, request: Request) -> None:
        """Starts compiling a request's grammar, in another thread; raises as `check`."""
        self.check(request.params)
        future = self._compiler.submit(request.params.structured_outputs)
        self.requests[request.request_id], self._futures[request.request_id] = request, future

    def _made_compiler(self, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except ImportError as error:
            raise ValueError(f"structured_outputs cannot be used: {error}") from error

    def ready(self, *, block: bool) -> list[Request]:
        """Returns requests whose grammar is compiled, and those that ended as it failed.

        block: waits until one is done.
        """
        if self._in_step:
            wait(self._futures.values())
        elif block and self._futures:
            wait(self._futures.values(), return_when=FIRST_COMPLETED)
        done = [self._take(name) for name, future in list(self._futures.items()) if future.done()]
        for request, future in done:
            error = future.exception()
            if error is None:
                request.grammar = future.result()
            else:
                request.error = str(error)
                _end(request, "error")
        return [request for request, _ in done]

    def resume(self, requests: Iterable[Request]) -> None:
        """Compiles the grammars of restored requests, and advances them over their outputs.

        Raises:
          ValueError: as `submit`, or a grammar that fails.
        """
        ruled = [request for request in requests if request.params.structured_outputs is not None]
        for request in ruled:
            self.submit(request)
        while self.requests:
            self.ready(block=True)
        for request in ruled:
            if request.grammar is None or self.accept(request, request.output_token_ids):
                raise ValueError(f"request {request.request_id!r} cannot resume: {request.error}")

    def close(self) -> None:
        """Ends the compiler's threads."""
        if self._compiler is not None:
            self._compiler.close()

    def drop(
        self, request_ids: Iterable[str], reason: str, stop_reason: int | str | None = None
    ) -> None:
        """Ends requests that wait; ids of others are ignored."""
        for request_id in request_ids:
            if request_id in self.requests:
                request, _ = self._take(request_id)
                request.stop_reason = stop_reason
                _end(request, reason)

    def _take(self, request_id: str) -> tuple[Request, Future]:
        return self.requests.pop(request_id), self._futures.pop(request_id)

    @staticmethod
    def is_due(requests: Mapping[str, Request]) -> bool:
        """Whether a step of these requests needs masks."""
        return any(request.grammar is not None for request in requests.values())

    @staticmethod
    def bitmask(
        scheduled: SchedulerOutput, vocab_size: int
    ) -> tuple[GrammarOutput, dict[str, str]]:
        """Returns masks of the tokens that grammars allow next, and errors of failed ones by id.

        Each row of a request assumes that the drafts before it are accepted. A draft that its
        grammar forbids is masked at its position, so the device rejects it. All tokens are allowed
        behind a request's drafts, for a request that has just ended, and where a grammar failed.
        """
        failed: dict[str, str] = {}
        ruled = [request for request in scheduled.requests.values() if request.grammar is not None]
        most = max(scheduled.num_drafts.values(), default=0)
        bitmask = np.full((len(ruled), 1 + most, -(-vocab_size // 32)), -1, np.int32)
        for rows, request in zip(bitmask, ruled, strict=True):
            if request.finish_reason is not None:
                continue
            num_drafts = scheduled.num_drafts.get(request.request_id, 0)
            try:
                drafts = request.draft_token_ids[:num_drafts]
                request.grammar.fill_drafts(rows[: 1 + num_drafts], drafts)
            except BaseException as error:
                failed[request.request_id] = f"{FAILED}: {of_foreign_code(error)}"
                rows[:] = -1
        return GrammarOutput(tuple(request.request_id for request in ruled), bitmask), failed

    @staticmethod
    def accept(request: Request, token_ids: list[int]) -> str | None:
        """Advances a request's grammar by new tokens. Returns the finish reason if it ends here."""
        grammar = request.grammar
        if grammar is None or request.finish_reason is not None:
            return None
        try:
            if grammar.accept(token_ids):
                return "stop" if grammar.finished else None
            request.error = (
                f"structured_outputs: the grammar refuses a token of {token_ids}: "
                f"{grammar.error or 'it allows others'}"
            )
        except BaseException as error:
            request.error = f"{FAILED}: {of_foreign_code(error)}"
        return "error"

    @staticmethod
    def may_end(request: Request) -> bool:
        """Whether a request's output is complete for its grammar; False if the grammar fails."""
        try:
            return request.grammar is not None and request.grammar.is_accepting
        except BaseException as error:
            of_foreign_code(error)
            return False


def _end(request: Request, reason: str) -> None:
    # The status too, which requests that share its prefix look at.
    request.finish_reason, request.status = reason, Status.FINISHED
