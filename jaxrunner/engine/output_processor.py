"""Turns the tokens of a request into its user's outputs: text, stop strings, deltas, times."""

from collections import Counter
from collections.abc import Iterator, Sequence
import time
from typing import Any

import numpy as np

from jaxrunner.api.logprobs import FlatLogprobs
from jaxrunner.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxrunner.api.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.engine.completion_logprobs import CompletionLogprobs, LogprobDict
from jaxrunner.scheduling.request import Request
from jaxrunner.text.detokenizer import Detokenizer, StopChecker
from jaxrunner.text.tokenizer import Tokenizer


class RequestState:
    """One completion, from its prompt to its end, and how much of it was handed out."""

    def __init__(self, name: str, params: SamplingParams, index: int = 0):
        self.name, self.params, self.index = name, params, index
        self.request_id = f"{name}.{index}" if index else name
        self.prompt: str | None = None
        self.prompt_token_ids: list[int] | None = None
        self.request: Request | None = None
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.times: dict[str, float] = dict(arrival_s=time.monotonic())
        self._logprobs = CompletionLogprobs(params)
        self._detokenizer: Detokenizer | None = None
        self._stops = StopChecker(params)
        # How much `completion(delta=True)` has returned.
        self._emitted_tokens = self._emitted_text = self._emitted_heads = 0
        self.emitted_all = False  # whether that included the end

    def start(self, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """Sets the prompt's tokens. Without a tokenizer the completion has no text."""
        self.prompt_token_ids = list(token_ids)
        self._logprobs.tokenizer = tokenizer
        if tokenizer is not None and self.params.detokenize:
            skip, spaces = (
                self.params.skip_special_tokens,
                self.params.spaces_between_special_tokens,
            )
            self._detokenizer = Detokenizer(tokenizer, token_ids, skip, spaces)

    def saved(self) -> dict[str, Any]:
        """Returns what `restored` needs; text and logprobs follow from the request."""
        now_s = time.monotonic()  # of this process
        return dict(
            name=self.name, params=self.params, index=self.index, prompt=self.prompt,
            request=self.request, ages_s={k: now_s - t for k, t in self.times.items()},
            told=(self._emitted_tokens, self._emitted_text, self._emitted_heads, self.emitted_all),
        )  # fmt: skip

    @classmethod
    def restored(cls, saved: dict[str, Any], tokenizer: Tokenizer | None) -> "RequestState":
        """Returns the completion that was `saved`, perhaps by another process."""
        state, request = cls(saved["name"], saved["params"], saved["index"]), saved["request"]
        state.prompt, state.request = saved["prompt"], request
        state.start(request.prompt_token_ids, tokenizer)
        state.update(request, request.output_token_ids)
        now_s = time.monotonic()
        state.times = {k: now_s - age_s for k, age_s in saved["ages_s"].items()}
        (
            state._emitted_tokens, state._emitted_text, state._emitted_heads, state.emitted_all,
        ) = saved["told"]  # fmt: skip
        return state

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def has_emitted(self) -> bool:
        """Whether `completion(delta=True)` has returned a token or the end."""
        return self.emitted_all or self._emitted_tokens > 0

    @property
    def has_new_output(self) -> bool:
        """Whether `completion(delta=True)` would return something new."""
        return not self.emitted_all and (
            self.finished or self._emitted_tokens < len(self.token_ids)
        )

    def update(self, request: Request, new_token_ids: Sequence[int]) -> bool:
        """Adds new tokens. Returns whether the completion ended here but the request has not."""
        if self.finish_reason is not None:
            return False
        try:
            self._take(request, new_token_ids)
        except ValueError as error:  # of the tokenizer
            self.fail(str(error))
        return self.finished and request.finish_reason is None

    def _take(self, request: Request, new_token_ids: Sequence[int]) -> None:
        if new_token_ids and "first_token_s" not in self.times:
            self.times["first_token_s"] = time.monotonic()
        if request.logprobs:
            self._logprobs.add(request, new_token_ids)
        if self._detokenizer is None:
            self.token_ids += new_token_ids
        elif self._add_tokens(request, new_token_ids, self._detokenizer):
            return
        if request.finish_reason is not None:
            self.error = request.error
            self._end(request.finish_reason, request.stop_reason)

    def fail(self, error: str) -> None:
        """Ends the completion with an error."""
        self.error = error
        self._end("error", None)

    def abort(self) -> None:
        """Ends the completion as aborted, unless it has ended."""
        if not self.finished:
            self._end("abort", None)

    def count(self, totals: Counter[str]) -> None:
        """Adds the completion, which has ended, to an engine's totals."""
        totals[f"reason {self.finish_reason}"] += 1
        totals["generation_tokens"] += len(self.token_ids)
        for i, count in enumerate(self.request.draft_counts if self.request else ()):
            totals[f"drafts {i}"] += count
        if self.index == 0:  # of the prompt
            totals["prompt_tokens"] += len(self.prompt_token_ids or ())
            totals["cached_tokens"] += self.request.num_cached_tokens if self.request else 0

    def completion(self, *, delta: bool = False) -> CompletionOutput:
        """Returns the completion so far, or with `delta` what is new since the last such call."""
        start, shown = (self._emitted_tokens, self._emitted_text) if delta else (0, 0)
        count, end = len(self.token_ids), len(self.text)
        if delta and not self.finished:
            end = max(shown, end - self._stops.num_held(self.text))
        if delta:
            self._emitted_tokens, self._emitted_text = count, end
            self.emitted_all = self.finished
        return CompletionOutput(
            index=self.index,
            text=self.text[shown:end],
            token_ids=self.token_ids[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            heads=self._heads(delta=delta),
            routed_experts=self._routed_experts(),
            **self._logprobs.fields(start, count),
        )

    def _routed_experts(self) -> np.ndarray | None:
        """Returns the experts of all tokens but the last, once it has ended normally."""
        found = None if self.request is None or not self.finished else self.request.routed_experts
        if found is None:
            return None
        routes = found if isinstance(found, np.ndarray) else found.get()
        return routes[: len(self.prompt_token_ids or ()) + len(self.token_ids) - 1]

    def _heads(self, *, delta: bool) -> dict[str, list[np.ndarray]] | None:
        """Returns outputs of the model's heads so far, with `delta` since the last such call."""
        heads = {} if self.request is None else self.request.heads
        start = self._emitted_heads if delta else 0
        if delta:
            self._emitted_heads = max(map(len, heads.values()), default=0)
        return {name: values[start:] for name, values in heads.items()} or None

    def prompt_logprobs(self) -> list[LogprobDict | None] | FlatLogprobs | None:
        """Returns an entry for each token of the prompt, None for those without logprobs.

        Returns None where none are wanted, or where the tokenizer fails, and sets `error` then.
        """
        if (wanted := self.params.prompt_logprobs) is None or self.request is None:
            return None
        try:
            return self._logprobs.of_prompt(self.request, self.prompt_token_ids or (), wanted)
        except ValueError as error:
            self.error = str(error)
            return None

    def _add_tokens(self, request: Request, token_ids: Sequence[int], text: Detokenizer) -> bool:
        """Adds tokens and their text. Returns whether a stop string ended the request."""
        for i, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            last = i == len(token_ids) and request.finish_reason == "stop"
            if last and token_id in request.stop_ids and not self.params.include_stop_str_in_output:
                break  # the stop token is no part of the text
            if self._add_text(text.append([token_id])):
                return True
        return False

    def _add_text(self, new: str) -> bool:
        """Adds text. Returns whether it completed a stop string, which ends the request."""
        self.text += new
        match = self._stops.find(self.text, len(new), len(self.token_ids))
        if match is not None:
            self.text = match.text
            self._finish("stop", match.stop)
        return match is not None

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        # The detokenizer holds incomplete characters back, whose text may complete a stop string.
        try:
            rest = "" if self._detokenizer is None else self._detokenizer.flush()
        except ValueError as error:  # of the tokenizer
            rest, self.error, reason, stop_reason = "", str(error), "error", None
        if not self._add_text(rest):
            self._finish(reason, stop_reason)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.times["finished_s"] = time.monotonic()


def request_output(
    group: Sequence[RequestState],
    outputs: Sequence[CompletionOutput],
    *,
    finished: bool | None = None,
    with_prompt: bool = True,
) -> RequestOutput:
    """Returns the output of a prompt with these `outputs`; group: all of its completions.

    with_prompt: whether it has the prompt's logprobs, if wanted; else they are an empty list.
    """
    first = group[0]
    prompt_logprobs = first.prompt_logprobs() if with_prompt else None
    if not with_prompt and first.params.prompt_logprobs is not None:
        prompt_logprobs = []
    finished = all(state.finished for state in group) if finished is None else finished
    metrics: dict[str, Any] = dict(arrival_s=min(state.times["arrival_s"] for state in group))
    starts = [state.times[k] for state in group if (k := "first_token_s") in state.times]
    if starts:
        metrics["first_token_s"] = min(starts)
    if finished:
        metrics["finished_s"] = max(state.times["finished_s"] for state in group)
    counts = [state.request.draft_counts for state in group if state.request]
    if drafted := [one for one in counts if one]:
        num_drafts, tokens, *accepted = map(sum, zip(*drafted, strict=True))
        metrics |= dict(num_drafts=num_drafts, num_draft_tokens=tokens)
        metrics["num_accepted_tokens_per_pos"] = tuple(accepted)
    return RequestOutput(
        request_id=first.name,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=prompt_logprobs,
        outputs=list(outputs),
        finished=finished,
        metrics=RequestMetrics(**metrics),
        num_cached_tokens=first.request.num_cached_tokens if first.request else 0,
        error=next((state.error for state in group if state.error is not None), None),
    )


def has_new_outputs(group: Sequence[RequestState]) -> bool:
    """Whether `new_outputs` would yield."""
    if group[0].params.output_kind == RequestOutputKind.FINAL_ONLY:
        return all(state.finished for state in group)
    return any(state.has_new_output for state in group)


def new_outputs(group: Sequence[RequestState]) -> Iterator[RequestOutput]:
    """Yields a stream's outputs for new tokens of a prompt, and counts these as emitted."""
    kind = group[0].params.output_kind
    if kind == RequestOutputKind.FINAL_ONLY:
        if has_new_outputs(group):
            yield request_output(group, [state.completion(delta=True) for state in group])
        return
    growing = kind == RequestOutputKind.CUMULATIVE
    for state in group:
        if state.has_new_output:
            is_first = growing or not any(s.has_emitted for s in group)
            new = state.completion(delta=True)
            output = state.completion() if growing else new
            finished = all(s.emitted_all for s in group)
            yield request_output(group, [output], finished=finished, with_prompt=is_first)
