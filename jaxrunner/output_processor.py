"""Turns the tokens of a request into what its user sees: text, stop strings, deltas, times."""

from collections.abc import Sequence
import time

from jaxrunner.detokenizer import Detokenizer, StopChecker
from jaxrunner.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxrunner.params import SamplingParams
from jaxrunner.request import Request
from jaxrunner.tokenizer import Tokenizer


class RequestState:
    """One request on its way through the engine, as its user will see it."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ):
        self.request_id, self.prompt, self.prompt_token_ids = request_id, prompt, list(token_ids)
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self._arrival_s = time.monotonic()
        self._first_scheduled_s: float | None = None
        self._first_token_s: float | None = None
        self._finished_s: float | None = None
        self._told_tokens = self._told_text = 0
        self._detokenizer, self._stops = None, StopChecker(params)
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, token_ids, params.skip_special_tokens)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def fail(self, error: str) -> None:
        """Ends the request with an error of its own."""
        self._end("error", None)
        self.error = error

    def update(self, request: Request, new_token_ids: Sequence[int]) -> bool:
        """Takes in new tokens. Returns whether a stop string ended the request just now."""
        if self.finished:
            return False
        self.num_cached_tokens = request.num_cached_tokens
        if new_token_ids and self._first_token_s is None:
            self._first_token_s = time.monotonic()
        for token in new_token_ids:
            self.token_ids.append(token)
            if self._detokenizer is not None and self._append_text(self._detokenizer, token):
                return True
        if request.finish_reason is not None:
            self._end(request.finish_reason, request.stop_reason)
        return False

    def abort(self) -> None:
        """Ends the request where it stands."""
        if not self.finished:
            self._end("abort", None)

    def _append_text(self, detokenizer: Detokenizer, token: int) -> bool:
        raise NotImplementedError

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._finished_s = time.monotonic()
