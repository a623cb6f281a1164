"""Turns the tokens of a request into what its user sees: text, stop strings, deltas, times."""

from collections.abc import Iterator, Sequence
import time
from typing import Any

import jax
import numpy as np

from jaxrunner.api.logprobs import FlatLogprobs, Logprob
from jaxrunner.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.scheduling.request import Request
from jaxrunner.text.detokenizer import Detokenizer, StopChecker
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.types import Logprobs

LogprobDict = dict[int, Logprob]
ARRAYS = ("value", "raw", "processed", "kept_mass")


class RequestState:
    """One completion as its user will see it, from its prompt to its end."""

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
        self._logprobs: Any = FlatLogprobs() if params.flat_logprobs else []
        self._arrays: dict[str, list[float]] = {name: [] for name in ARRAYS}
        self._num_parts = 0  # of `request.logprobs`, taken in
        self._tokenizer: Tokenizer | None = None
        self._detokenizer: Detokenizer | None = None
        self._stops = StopChecker(params)
        self._told_tokens = self._told_text = self._told_heads = 0
        self.told_all = False  # whether `completion(delta=True)` has told the end

    def start(self, token_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        """Takes in the prompt's tokens. Without a tokenizer there will be no text."""
        self.prompt_token_ids = list(token_ids)
        self._tokenizer = tokenizer
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
            told=(self._told_tokens, self._told_text, self._told_heads, self.told_all),
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
            state._told_tokens, state._told_text, state._told_heads, state.told_all,
        ) = saved["told"]  # fmt: skip
        return state

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def has_told(self) -> bool:
        """Whether `completion(delta=True)` has told something."""
        return self.told_all or self._told_tokens > 0

    @property
    def has_news(self) -> bool:
        """Whether there is something that `completion(delta=True)` has not told."""
        return not self.told_all and (self.finished or self._told_tokens < len(self.token_ids))

    def update(self, request: Request, new_token_ids: Sequence[int]) -> bool:
        """Takes in new tokens. Returns whether it ends here, and the engine does not know."""
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
            self._add_logprobs(request, new_token_ids)
        if self._detokenizer is None:
            self.token_ids += new_token_ids
        elif self._add_tokens(request, new_token_ids, self._detokenizer):
            return
        if request.finish_reason is not None:
            self.error = request.error
            self._end(request.finish_reason, request.stop_reason)

    def fail(self, error: str) -> None:
        """Ends the request with an error of its own."""
        self.error = error
        self._end("error", None)

    def abort(self) -> None:
        """Ends the request where it stands."""
        if not self.finished:
            self._end("abort", None)

    def completion(self, *, delta: bool = False) -> CompletionOutput:
        """Returns the completion so far, or with `delta` what is new since the last such call."""
        start, shown = (self._told_tokens, self._told_text) if delta else (0, 0)
        count, end = len(self.token_ids), len(self.text)
        if delta and not self.finished:
            end = max(shown, end - self._stops.num_held(self.text))
        if delta:
            self._told_tokens, self._told_text = count, end
            self.told_all = self.finished
        told = self.params.num_logprobs is not None
        arrays = {
            name: np.array(self._arrays[name][start:count], np.float32)
            for name in (ARRAYS if told else ())
        }
        return CompletionOutput(
            index=self.index,
            text=self.text[shown:end],
            token_ids=self.token_ids[start:],
            cumulative_logprob=sum(self._arrays["value"][:count]) if told else None,
            logprobs=self._logprobs[start:count] if told else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            raw_logprobs=arrays.get("raw"),
            processed_logprobs=arrays.get("processed"),
            kept_mass=arrays.get("kept_mass"),
            heads=self._heads(delta=delta),
            routed_experts=self._routed_experts(),
        )

    def _routed_experts(self) -> np.ndarray | None:
        """Returns the experts of all tokens but the last, of a completion that has ended well."""
        told = None if self.request is None or not self.finished else self.request.routed_experts
        if told is None:
            return None
        routes = told if isinstance(told, np.ndarray) else told.get()
        return routes[: len(self.prompt_token_ids or ()) + len(self.token_ids) - 1]

    def _heads(self, *, delta: bool) -> dict[str, list[np.ndarray]] | None:
        """Returns what the model's heads said so far, or with `delta` since the last such call."""
        said = {} if self.request is None else self.request.heads
        start = self._told_heads if delta else 0
        if delta:
            self._told_heads = max(map(len, said.values()), default=0)
        return {name: values[start:] for name, values in said.items()} or None

    def prompt_logprobs(self) -> list[LogprobDict | None] | FlatLogprobs | None:
        """Returns an entry a token of the prompt, None for those that were not scored.

        None, and `error` says why, where the tokenizer fails.
        """
        if (wanted := self.params.prompt_logprobs) is None or self.request is None:
            return None
        entries: list[LogprobDict | None] = [None] * len(self.prompt_token_ids or ())
        try:
            for positions, part in self.request.prompt_logprobs:
                ids = [(self.prompt_token_ids or [])[p] for p in positions.tolist()]
                named = self._entries(part, ids, wanted, ranked=True)
                for position, entry in zip(positions.tolist(), named, strict=True):
                    entries[position] = entry
        except ValueError as error:
            self.error = str(error)
            return None
        if not self.params.flat_logprobs:
            return entries
        flat = FlatLogprobs()
        flat.extend(entries)
        return flat

    def _add_logprobs(self, request: Request, token_ids: Sequence[int]) -> None:
        if (wanted := self.params.num_logprobs) is None:
            return
        ranked, at = self.params.logprob_token_ids is None, 0
        for part in request.logprobs[self._num_parts :]:
            tokens = token_ids[at : (at := at + part.value.size)]
            self._logprobs += self._entries(part, tokens, wanted, ranked=ranked)
            for name in ARRAYS:
                self._arrays[name] += getattr(part, name).tolist()
        self._num_parts = len(request.logprobs)

    def _entries(
        self, part: Logprobs, token_ids: Sequence[int], wanted: int, *, ranked: bool
    ) -> Iterator[LogprobDict]:
        """Yields the logprobs of each token: its own first, then the `wanted` others."""
        count = part.top_ids.shape[1] if wanted == -1 else wanted
        rows: Any = jax.tree.map(np.ndarray.tolist, part)
        for i, token_id in enumerate(token_ids):
            entry = {token_id: Logprob(rows.value[i], rows.rank[i], self._token_text(token_id))}
            others = zip(rows.top_ids[i][:count], rows.top_value[i], strict=False)
            for rank, (other, value) in enumerate(others, 1):
                if other != token_id:
                    text = self._token_text(other)
                    entry[other] = Logprob(value, rank if ranked else None, text)
            yield entry

    def _add_tokens(self, request: Request, token_ids: Sequence[int], text: Detokenizer) -> bool:
        """Adds tokens and their text. Returns whether a stop string ended the request."""
        for i, token_id in enumerate(token_ids, 1):
            self.token_ids.append(token_id)
            last = i == len(token_ids) and request.finish_reason == "stop"
            if last and token_id in request.stop_ids and not self.params.include_stop_str_in_output:
                break  # it ends the text and is no part of it
            if self._add_text(text.append([token_id])):
                return True
        return False

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)

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
    """Returns the output of a prompt with these `outputs`; `group` is its completions.

    with_prompt: whether the prompt's logprobs, if wanted, are told; else they are an empty list.
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
