"""Where the host's time goes: an engine's own methods, timed from outside, by phase.

add       a prompt is checked and queued         dispatch  programs are launched
schedule  who computes how many tokens           wait      for the device
pack      a step's plan as one vector            read      tokens are taken in, requests end
admit     new requests enter the device's tables output    what users see: text, stop strings
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
import functools
import statistics
import time
from typing import Any
from unittest import mock

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.output_processor import RequestState
from jaxrunner.llm import LLM
from jaxrunner.runner.step_handle import StepHandle
from jaxrunner.text.prompts import parse_prompts

PHASES = ("add", "schedule", "pack", "admit", "dispatch", "wait", "read", "output")


class Clock:
    """Seconds of each phase while it is entered; none counts what is timed inside it."""

    def __init__(self, llm: LLM):
        completions, engine, runner = llm.completions, llm.engine, llm.engine.runner
        self._methods = (
            (llm, "generate", "output"),
            (completions, "add", "add"),
            (engine.scheduler, "schedule", "schedule"),
            (runner, "_prepare", "pack"),
            (runner, "_admit", "admit"),
            (runner, "step", "dispatch"),
            (runner, "execute_model", "dispatch"),
            (runner, "sample_tokens", "dispatch"),
            (StepHandle, "wait", "wait"),
            (engine, "step", "read"),
            (completions, "step", "output"),
        )
        self._seconds, self._inner = defaultdict[str, float](float), 0.0
        self._patches = ExitStack()

    def __enter__(self) -> "Clock":
        for owner, name, phase in self._methods:
            timed = self._timed(phase, getattr(owner, name))
            self._patches.enter_context(mock.patch.object(owner, name, timed))
        return self

    def __exit__(self, *_: Any) -> None:
        self._patches.close()

    def lap(self) -> Mapping[str, float]:
        """Returns the seconds since the last lap."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds

    def _timed(self, phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                took = time.perf_counter() - start
                self._seconds[phase] += took - self._inner
                self._inner = outer + took

        return call


def decode_us(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, num_steps: int
) -> dict[str, float]:
    """Returns the median microseconds by phase of a step in which each prompt gains a token.

    "host" is all phases but the wait, "step" all. `params` must ask for many more tokens.
    """
    config = llm.engine.config
    num_launches = -(-num_steps // config.num_decode_steps)
    completions, laps = llm.completions, deque[Mapping[str, float]](maxlen=num_launches)
    states: list[RequestState] = []
    for prompt in parse_prompts(prompts):
        completions.add(prompt, params, into=states)
    while not all(state.token_ids for state in states):
        completions.step()
    with Clock(llm) as clock:
        # Launches still in flight may be of other steps: not kept.
        for _ in range(config.async_depth + num_launches):
            clock.lap()
            before = len(states[0].token_ids)
            completions.step()
            num_tokens = len(states[0].token_ids) - before
            laps.append({phase: s / num_tokens for phase, s in clock.lap().items()})
    assert not any(state.finished for state in states), "a request ended while it was timed"
    completions.drop(states)
    phases = [phase for phase in PHASES if any(phase in lap for lap in laps)]
    sums = [[lap.get(phase, 0.0) for phase in phases] for lap in laps]
    by_phase = dict(zip(phases, map(statistics.median, zip(*sums, strict=True)), strict=True))
    return _with_sums(by_phase, 1e6)


def generate_ms(llm: LLM, prompts: Sequence[Any], params: Any) -> dict[str, float]:
    """Returns the milliseconds of one `generate` by phase, with sums as `decode_us` has them."""
    with Clock(llm) as clock:
        llm.generate(prompts, params, use_tqdm=False, on_error="raise")
        return _with_sums(clock.lap(), 1e3)


def _with_sums(seconds: Mapping[str, float], scale: float) -> dict[str, float]:
    scaled = {phase: seconds[phase] * scale for phase in PHASES if phase in seconds}
    step = sum(scaled.values())
    return scaled | {"host": step - scaled.get("wait", 0.0), "step": step}
