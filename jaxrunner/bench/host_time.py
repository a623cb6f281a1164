"""Where the host's time goes, by the phases of `runner.phases`."""

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
import statistics
import time
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.output_processor import RequestState
from jaxrunner.llm import LLM
from jaxrunner.runner.phases import PHASES, listening
from jaxrunner.text.prompts import parse_prompts


class Clock:
    """Seconds of each phase while it is entered; none counts the phases inside it."""

    def __init__(self):
        self._seconds = defaultdict[str, float](float)
        self._open: list[tuple[str, float]] = []  # phases that have begun, and when
        self._inner = [0.0]  # seconds of the phases inside each
        self._listening = ExitStack()

    def __enter__(self) -> "Clock":
        self._listening.enter_context(listening(self))
        return self

    def __exit__(self, *_: Any) -> None:
        self._listening.close()

    def begin(self, phase: str) -> None:
        """Starts to time a phase."""
        self._open.append((phase, time.perf_counter()))
        self._inner.append(0.0)

    def end(self) -> None:
        """Adds the time of the innermost phase."""
        phase, start = self._open.pop()
        took = time.perf_counter() - start
        self._seconds[phase] += took - self._inner.pop()
        self._inner[-1] += took

    def lap(self) -> Mapping[str, float]:
        """Returns the seconds since the last lap."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return seconds


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
    with Clock() as clock:
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
    with Clock() as clock:
        llm.generate(prompts, params, use_tqdm=False, on_error="raise")
        return _with_sums(clock.lap(), 1e3)


def _with_sums(seconds: Mapping[str, float], scale: float) -> dict[str, float]:
    scaled = {phase: seconds[phase] * scale for phase in PHASES if phase in seconds}
    step = sum(scaled.values())
    return scaled | {"host": step - scaled.get("wait", 0.0), "step": step}
