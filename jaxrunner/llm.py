"""The Python API: prompts in, text out.

with LLM("path/to/checkpoint") as llm:
    for output in llm.generate(["def fib(n):"], SamplingParams(temperature=0.7)):
        print(output.outputs[0].text)
"""

from collections.abc import Iterator, Sequence
import itertools
import threading
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxrunner.chat import render_chat
from jaxrunner.engine import Engine
from jaxrunner.loader import load
from jaxrunner.output_processor import RequestState
from jaxrunner.outputs import RequestOutput
from jaxrunner.params import SamplingParams
from jaxrunner.prompts import parse_prompts
from jaxrunner.tokenizer import Tokenizer
from jaxrunner.worker import engine_config


class LLM:
    """A model that answers prompts, many at once.

    model: a folder with config.json, safetensors and tokenizer.json, or a name on the Hugging
        Face hub, whose safetensors, json and txt files are fetched.
    tokenizer: a folder or a `Tokenizer` in place of the model's; `skip_tokenizer_init` for none.
    dtype: of weights and activations, "auto" for the checkpoint's.
    load_format: "auto" reads weights, "dummy" makes random ones on the device.
    hf_overrides: keys of config.json to replace; None removes one.
    generation_config: "auto" takes default sampling parameters from the checkpoint's file of that
        name, "vllm" ignores them.
    check_nan: whether weights are searched for NaN and infinity.
    The other sizes are fields of `EngineConfig`, or of `worker.engine_config`.

    Raises:
      FileNotFoundError, ValueError, TypeError, MemoryError: a bad checkpoint or setting; names it.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        load_format: str = "auto",
        hf_overrides: dict[str, Any] | None = None,
        generation_config: str = "auto",
        chat_template: str | None = None,
        check_nan: bool = False,
        warm_up: bool = True,
        use_tqdm: bool = True,
        **sizes: Any,
    ):
        loaded = load(
            model, revision=revision, dtype=dtype, seed=seed, load_format=load_format,
            tokenizer=None if skip_tokenizer_init else tokenizer or model, check_nan=check_nan,
            hf_overrides=hf_overrides or {}, generation_config=generation_config, progress=use_tqdm,
        )  # fmt: skip
        self.tokenizer, self._defaults = loaded.tokenizer, loaded.default_params
        self._eos_token_ids, self._chat_template = loaded.eos_token_ids, chat_template
        config = engine_config(loaded.config, loaded.params, dtype=loaded.dtype, seed=seed, **sizes)
        self.engine = Engine(loaded.model, loaded.config, config, loaded.params)
        if warm_up:
            self.engine.warm_up(progress=use_tqdm)
        self._states: dict[str, RequestState] = {}
        self._names = map(str, itertools.count())
        self._lock = threading.RLock()  # threads may generate at once: each step serves all
        self._closed = False

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        on_error: str = "return",
    ) -> list[RequestOutput]:
        """Answers prompts, in their order.

        prompts: a str, {"prompt": str}, {"prompt_token_ids": [int]}, or a list of them.
        sampling_params: one for all prompts, or one for each; the model's defaults where None.
        on_error: "return" gives a bad prompt an output with finish_reason="error" and its
            message, and answers the others; "raise" raises before any is answered.
        """
        states = self._add(prompts, sampling_params, priority, on_error)
        bar = tqdm(total=len(states), desc="Processed prompts", disable=not use_tqdm)
        try:
            with bar:
                while unfinished := [s for s in states if not s.finished]:
                    bar.update(len(states) - len(unfinished) - bar.n)
                    self._step()
                bar.update(len(states) - bar.n)
        finally:
            self._drop(states)
        return [state.output() for state in states]

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_error: str = "return",
    ) -> Iterator[RequestOutput]:
        """Answers prompts like `generate`, yielding what is new of each request as it comes.

        The text and token ids of a yielded output are those since the last one of that request;
        its last one has `finished` set.
        """
        states = self._add(prompts, sampling_params, priority, on_error)
        try:
            live = states
            while live:
                for state in live:
                    if state.has_news:
                        yield state.output(delta=True)
                live = [state for state in live if not state.told_all]
                if live and not any(state.has_news for state in live):
                    self._step()
        finally:
            self._drop(states)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, a list of messages, or several, a list of such lists."""
        tokenizer = self._need_tokenizer("chat")
        many = bool(messages) and not isinstance(messages[0], dict)
        prompts = []
        for conversation in messages if many else [messages]:
            text = render_chat(
                chat_template or self._chat_template or tokenizer.chat_template,
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                **chat_template_kwargs or {},
            )
            # The template has written the special tokens itself.
            prompts.append({"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def abort(self, request_id: str) -> None:
        """Ends a request at any phase; its output says so. Unknown ids are ignored."""
        with self._lock:
            self.engine.abort([request_id])
            if request_id in self._states:
                self._states[request_id].abort()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what requests without parameters get."""
        return self._defaults

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False, and no change, while a request runs."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Gives the device memory back. May be called twice; no request can follow."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.abort(list(self._states))
                self.engine.close()
                for array in jax.tree.leaves(self.engine.runner.params):
                    array.delete()

    def _add(self, prompts, sampling_params, priority, on_error: str) -> list[RequestState]:
        """Queues prompts. Those that are bad are finished already, unless `on_error` raises."""
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
        if self._closed:
            raise RuntimeError("this LLM is closed: build another one")
        prompts = parse_prompts(prompts)
        sampling_params = self._defaults if sampling_params is None else sampling_params
        params = self._one_each("sampling_params", sampling_params, len(prompts))
        for param in params:
            if not isinstance(param, SamplingParams):
                raise TypeError(
                    f"sampling_params must be a SamplingParams, got {type(param).__name__}: "
                    "pass SamplingParams(...), or a list of them"
                )
        priorities = self._one_each("priority", 0 if priority is None else priority, len(prompts))
        states: list[RequestState] = []
        try:
            for prompt, param, rank in zip(prompts, params, priorities, strict=True):
                states.append(self._add_one(prompt, param, rank, on_error))
        except BaseException:
            self._drop(states)
            raise
        return states

    def _add_one(self, prompt, params, priority: int, on_error: str) -> RequestState:
        state = RequestState(next(self._names), params)
        try:
            state.prompt, token_ids = prompt.resolve(self.tokenizer)
            state.start(token_ids, self.tokenizer)
            with self._lock:
                self.engine.add(
                    state.request_id, token_ids, params,
                    eos_token_ids=self._eos_token_ids, priority=priority,
                )  # fmt: skip
                self._states[state.request_id] = state
        except (TypeError, ValueError) as error:
            if on_error == "raise":
                raise
            state.fail(str(error))
        return state

    def _one_each(self, name: str, value: Any, count: int) -> list[Any]:
        if not isinstance(value, Sequence):
            return [value] * count
        if len(value) != count:
            raise ValueError(f"{name} must be one, or one for each of {count} prompts, "
                             f"got {len(value)}")  # fmt: skip
        return list(value)

    def _step(self) -> None:
        """Runs one step of the engine for whoever waits, and hands out its tokens."""
        with self._lock:
            for request, tokens in self.engine.step():
                state = self._states.get(request.request_id)
                if state is not None and state.update(request, tokens):
                    self.engine.abort([request.request_id], "stop")

    def _drop(self, states: list[RequestState]) -> None:
        """Forgets requests; those that are unfinished, after an interrupt, are aborted."""
        with self._lock:
            for state in states:
                if not state.finished:
                    self.abort(state.request_id)
                self._states.pop(state.request_id, None)

    def _need_tokenizer(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{purpose} needs a tokenizer: leave skip_tokenizer_init out")
        return self.tokenizer
