"""Turns the tokens of a request into what its user sees: text, stop strings, deltas, times."""

from collections.abc import Sequence
import time

from jaxrunner.detokenizer import Detokenizer, StopChecker
from jaxrunner.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxrunner.params import SamplingParams
from jaxrunner.request import Request
from jaxrunner.tokenizer import Tokenizer


class RequestState:
    """One request as its user will see it, from its prompt to its end."""

    def __init__(self, request_id: str, params: SamplingParams):
        self.request_id, self.params = request_id, params
        self.prompt: str | None = None
        self.prompt_token_ids: list[int] | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.num_cached_tokens = 0
        self._times: dict[str, float] = dict(arrival_s=time.monotonic())
        self._detokenizer: Detokenizer | None = None
        self._stops = StopChecker(params)
        self._told_tokens = self._told_text = 0
        self.told_all = False  # whether `output(delta=True)` has told the end

    def start(self, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """Takes in the prompt's tokens. Without a tokenizer there will be no text."""
        self.prompt_token_ids = list(token_ids)
        if tokenizer is not None and self.params.detokenize:
            skip = self.params.skip_special_tokens
            self._detokenizer = Detokenizer(tokenizer, token_ids, skip)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something that `output(delta=True)` has not told."""
        return not self.told_all and (self.finished or self._told_tokens < len(self.token_ids))

    def update(self, request: Request, new_token_ids: Sequence[int]) -> bool:
        """Takes in new tokens. Returns whether a stop string ended the request just now."""
        if self.finished:
            return False
        self.num_cached_tokens = request.num_cached_tokens
        self._times.setdefault("first_token_s", time.monotonic())
        for token_id in new_token_ids:
            self.token_ids.append(token_id)
            if self._detokenizer is not None and self._add_text(
                self._detokenizer.append([token_id])
            ):
                return request.finish_reason is None
        if request.finish_reason is not None:
            self._end(request.finish_reason, request.stop_reason)
        return False

    def fail(self, error: str) -> None:
        """Ends the request with an error of its own."""
        self.error = error
        self._end("error", None)

    def abort(self) -> None:
        """Ends the request where it stands."""
        if not self.finished:
            self._end("abort", None)

    def output(self, *, delta: bool = False) -> RequestOutput:
        """Returns the request so far, or with `delta` what is new since the last such call."""
        start, shown = (self._told_tokens, self._told_text) if delta else (0, 0)
        end = len(self.text)
        if delta and not self.finished:
            end = max(shown, end - self._stops.num_held(self.text))
        completion = CompletionOutput(
            index=0,
            text=self.text[shown:end],
            token_ids=self.token_ids[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        if delta:
            self._told_tokens, self._told_text = len(self.token_ids), end
            self.told_all = self.finished
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[completion],
            finished=self.finished,
            metrics=RequestMetrics(**self._times),
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )

    def _add_text(self, new: str) -> bool:
        """Adds text. Returns whether it completed a stop string, which ends the request."""
        self.text += new
        match = self._stops.find(self.text, len(new), len(self.token_ids))
        if match is not None:
            self.text = match.text
            self._finish("stop", match.stop)
        return match is not None

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        # Bytes that wait to become a character may complete a stop string instead.
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        if not self._add_text(rest):
            self._finish(reason, stop_reason)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self._times["finished_s"] = time.monotonic()
