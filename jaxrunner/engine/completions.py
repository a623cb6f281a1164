"""Queues completions of prompts, runs them, and hands out their tokens. Threads may share one."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
import itertools
from pathlib import Path
import threading
import time
from typing import Any

from jaxrunner.api.outputs import Interrupted, RequestOutput, RequestOutputs
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.interrupts import deferred
from jaxrunner.engine.output_processor import (
    RequestState,
    has_new_outputs,
    new_outputs,
    request_output,
)
from jaxrunner.engine.progress import REDRAW_S, Bar, progress_bar, tell_failures
from jaxrunner.engine.replicas import Replicas, engines_of, restore_engines, save_engines
from jaxrunner.engine.requested_prompts import RequestedPrompt
from jaxrunner.runner.phases import phase
from jaxrunner.runner.step_handle import NewTokens
from jaxrunner.scheduling.ranks import ranks_of
from jaxrunner.scheduling.request import Request
from jaxrunner.text.bad_word_ids import encode_words
from jaxrunner.text.prompts import ParsedPrompt
from jaxrunner.text.tokenizer import Tokenizer

BEGIN_AFTER = 16  # prompts that wait, of many that are queued: so many more have steps launched


class Completions:
    """All unfinished completions of an engine, with their texts and outputs."""

    def __init__(
        self, engine: Engine | Replicas, tokenizer: Tokenizer | None, eos_token_ids: Iterable[int]
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self._states: dict[str, RequestState] = {}
        self._num_named = 0
        self.lock = threading.RLock()  # several threads may generate: each step serves all
        self._closed = False
        self.totals: Counter[str] = Counter()  # of completions that have ended; see `metrics`

    @phase("add")
    def add(
        self, prompt: ParsedPrompt, params: SamplingParams, *, into: list[RequestState],
        on_error: str = "raise", **kwargs: Any,
    ) -> None:  # fmt: skip
        """Queues the `n` completions of a prompt; `kwargs` go to `Engine.add`.

        into: gains the completions before they are queued, so that an interrupt can `drop` them.

        Raises:
          RuntimeError: the engine sleeps or has ended.
          TypeError, ValueError: the prompt or a parameter is bad; with `on_error="return"` its
            completions are finished already, with the error, instead.
        """
        self.engine.status.check_awake()
        states = self._new_states(prompt, params)
        into += states
        try:
            max_len = self.engine.config.max_model_len
            room = max_len if params.truncate_prompt_tokens is None else None
            _, token_ids = prompt.resolve(self.tokenizer, room)
            token_ids = token_ids[-params.most_prompt_tokens(max_len) :]
            kwargs |= dict(cache_salt=prompt.cache_salt)
            for state in states:
                state.start(token_ids, self.tokenizer)
            params = encode_words(params, self.tokenizer)
            with self.lock:
                for state in states:
                    first = None if state is states[0] else states[0].request
                    self._add(state, token_ids, params, kwargs | {"prefix_from": first})
        except (TypeError, ValueError) as error:
            self.drop(states)
            if on_error == "raise":
                raise
            for state in states:
                state.fail(str(error))

    def _new_states(self, prompt: ParsedPrompt, params: SamplingParams) -> list[RequestState]:
        with self.lock:
            name, self._num_named = str(self._num_named), self._num_named + 1
        states = [RequestState(name, params, i) for i in range(params.n)]
        for state in states:
            state.prompt = prompt.text
        return states

    @deferred
    def _add(
        self, state: RequestState, token_ids: Sequence[int], params: SamplingParams,
        kwargs: dict[str, Any],
    ) -> None:  # fmt: skip
        if params.seed is not None:
            params = replace(params, seed=(params.seed + state.index) % 2**64)
        own = self.tokenizer and self.tokenizer.eos_token_id  # the first is no `stop_reason`
        kwargs |= dict(eos_token_ids=sorted(self.eos_token_ids, key=lambda t: (t != own, t)))
        state.request = self.engine.add(state.request_id, token_ids, params, **kwargs)
        self._states[state.request_id] = state

    def answer(
        self, requested: Sequence[RequestedPrompt], *, on_error: str, use_tqdm: Bar
    ) -> RequestOutputs:
        """Queues prompts, runs them, and returns their outputs in order. Warns of failed prompts.

        Raises:
          Interrupted: by Ctrl-C; has the outputs so far.
        """
        groups: list[list[RequestState]] = []
        try:
            try:
                self.queue(requested, into=groups, on_error=on_error)
                self._put_longest_first(groups)
                self.run(_all(groups), use_tqdm=use_tqdm)
            finally:
                self.drop(_all(groups))
            outputs = _outputs(groups)
            tell_failures(outputs)
            return outputs
        except KeyboardInterrupt as error:
            self.drop(_all(groups))  # the interrupt may have come in the middle of the first call
            groups = [group for group in groups if group]
            for prompt, params, _ in requested[len(groups) :]:
                groups.append(self._new_states(prompt, params))
                self.drop(groups[-1])
            raise Interrupted(_outputs(groups)) from error

    def queue(
        self, requested: Iterable[RequestedPrompt], *, into: list[list[RequestState]], on_error: str
    ) -> None:
        """Adds prompts; devices begin with the first. into: gains a list of each's completions."""
        ready = 0  # of one that waits for its grammar nobody knows when, or whether, it is ready
        for prompt, params, rest in requested:
            into.append([])
            self.add(prompt, params, into=into[-1], on_error=on_error, **rest)
            ready += params.structured_outputs is None and not into[-1][0].finished
            if ready == BEGIN_AFTER:
                self._begin()
                ready = 0

    @deferred
    def _begin(self) -> None:
        with self.lock:  # none is read: which steps are launched must not depend on the time
            if not self._closed:
                self.engine.begin()

    @deferred
    def _put_longest_first(self, groups: Iterable[Sequence[RequestState]]) -> None:
        """Orders requests that came together, and are handed out together, by `max_tokens`."""
        requests = [state.request for state in _all(groups) if state.request is not None]
        with self.lock:
            for engine in engines_of(self.engine):
                for rank in ranks_of(engine.scheduler):
                    rank.waiting.put_longest_first(requests)

    def run(self, states: Sequence[RequestState], *, use_tqdm: Bar = False) -> None:
        """Steps until these completions have ended."""
        shown_s = time.monotonic()
        with progress_bar(use_tqdm, total=len(states), desc="Processed prompts") as bar:
            for state in states:
                while not state.finished:
                    self.step()
                    if use_tqdm and time.monotonic() - shown_s > REDRAW_S:
                        bar.update(sum(state.finished for state in states) - bar.n)
                        shown_s = time.monotonic()
            bar.update(len(states) - bar.n)

    @phase("output")
    @deferred
    def step(self) -> None:
        """Runs one step of the engine, and hands its tokens to all completions."""
        self.engine.status.check_process()  # a fork may have copied a held lock
        with self.lock:
            if self._closed:
                return  # closed while this thread waited for the lock
            self._hand_out(self.engine.step())

    def _hand_out(self, gained: NewTokens) -> None:
        for request, tokens in gained:
            state = self._states.get(request.request_id)
            if state is not None and state.update(request, tokens):
                self.engine.finish([request.request_id], "stop")

    def queue_and_stream(
        self, requested: Iterable[RequestedPrompt], *, on_error: str
    ) -> Iterator[RequestOutput]:
        """Queues prompts and streams their completions, from when the first one is asked for."""
        groups: list[list[RequestState]] = []
        try:
            self.queue(requested, into=groups, on_error=on_error)
            yield from self.stream(groups)
        finally:
            self.drop(_all(groups))

    def stream(self, groups: Sequence[Sequence[RequestState]]) -> Iterator[RequestOutput]:
        """Steps until all completions have ended, and yields their new tokens."""
        left = groups
        try:
            while left:
                for group in left:
                    yield from new_outputs(group)
                left = [group for group in left if not all(s.emitted_all for s in group)]
                if left and not any(map(has_new_outputs, left)):
                    self.step()
        finally:
            self.drop(_all(groups))

    @deferred
    def save(self, folder: str | Path) -> None:
        """Writes completions that are unfinished or not wholly handed out; see `snapshot`."""
        self.engine.status.check_awake()
        with self.lock:
            self._hand_out(self.engine.drain())
            states = {name: state.saved() for name, state in self._states.items()}
            save_engines(self.engine, folder, states, num_named=self._num_named)

    def restore(self, folder: str | Path) -> list[list[RequestState]]:
        """Restores what `save` wrote. Returns the completions of each prompt."""
        self.engine.status.check_awake()
        with self.lock:
            parts = [each.more for each in restore_engines(self.engine, folder, self._restored)]
            self._num_named = max(num_named for _, num_named in parts)
            states = [state for states, _ in parts for state in states]
            states.sort(key=lambda state: (int(state.name), state.index))
            self._states = {state.request_id: state for state in states}
            return [list(group) for _, group in itertools.groupby(states, lambda s: s.name)]

    def _restored(
        self, more: dict[str, Any], requests: Sequence[Request]
    ) -> tuple[list[RequestState], int]:
        """Returns the completions that `save` wrote, one for each request, and the names used."""
        states = [RequestState.restored(saved, self.tokenizer) for saved in more["states"]]
        told = [(state.request_id, state.request) for state in states]
        if not all(request and request.request_id == name for name, request in told):
            raise ValueError("completions have other requests than their own")
        if len(dict(told)) < len(states) or not {*map(id, requests)} <= {id(r) for _, r in told}:
            raise ValueError("requests have not one completion each")
        num_named = max((int(state.name) + 1 for state in states), default=0)
        return states, max(int(more["num_named"]), num_named)

    def abort(self, name: str) -> None:
        """Aborts a prompt's completions, waiting or running; unknown names are ignored."""
        self.engine.status.check_process()
        with self.lock:
            for state in [state for state in self._states.values() if state.name == name]:
                self.engine.abort([state.request_id])
                state.abort()

    @deferred
    def drop(self, states: Iterable[RequestState]) -> None:
        """Forgets completions; aborts unfinished ones, as after an interrupt."""
        if self.engine.status.is_foreign:
            return
        with self.lock:
            for state in states:
                known = self._states.pop(state.request_id, None) is not None
                if known and not state.finished:
                    self.engine.abort([state.request_id])
                state.abort()
                if known:
                    state.count(self.totals)

    @deferred
    def reset_prefix_cache(self, *, running: bool) -> bool:
        """Forgets cached prefixes; with `running` preempts running requests, which start again."""
        self.engine.status.check()
        with self.lock:
            if running:
                self._hand_out(self.engine.drain())
                for engine in engines_of(self.engine):
                    engine.scheduler.restart()
                    engine.runner.restart()
            return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Aborts all, and closes the engine. May be called twice."""
        with self.lock:
            self._closed = True
            for state in self._states.values():
                state.abort()
            self.engine.close()


def _all(groups: Iterable[Sequence[RequestState]]) -> list[RequestState]:
    return list(itertools.chain.from_iterable(groups))


def _outputs(groups: Iterable[list[RequestState]]) -> RequestOutputs:
    """Returns the output of each prompt so far."""
    return RequestOutputs(
        request_output(group, [state.completion() for state in group]) for group in groups
    )
