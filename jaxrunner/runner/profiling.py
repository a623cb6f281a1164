"""Traces of a model at work, steps named as vLLM names them; whether the device works."""

from collections.abc import Sequence
import contextlib
from pathlib import Path
from typing import Any
import warnings

import jax
import jax.numpy as jnp

from jaxrunner.api.arguments import checked
from jaxrunner.api.validation import Bound
from jaxrunner.parallel.time_limit import ends_within
from jaxrunner.scheduling.request import SchedulerOutput

START: dict[str, Bound] = {"folder": Bound(str, also=(Path,))}
PROFILE: dict[str, Bound] = {
    "is_start": Bound(bool), "profile_prefix": Bound(str, optional=True, also=(Path,))
}  # fmt: skip


class Profiler:
    """Records what host and device do between `start` and `stop`, for Perfetto and XProf."""

    def __init__(self) -> None:
        self.folder: Path | None = None  # while it records
        self._last: str | Path | None = None  # folder of a `profile`
        self._num_steps = 0

    @checked(START)
    def start(self, folder: str | Path) -> None:
        """Records what host and device do, until `stop`; steps are named as vLLM's.

        Raises:
          RuntimeError: it records already.
        """
        if self.folder is not None:
            raise RuntimeError(f"a profile is recorded in {self.folder}: call stop_profile first")
        Path(folder).mkdir(parents=True, exist_ok=True)  # else `stop` would fail
        jax.profiler.start_trace(str(folder), create_perfetto_trace=True)
        self.folder = Path(folder)

    def stop(self) -> Path:
        """Ends the record. Returns the file that ui.perfetto.dev opens.

        Raises:
          RuntimeError: nothing is recorded.
        """
        if self.folder is None:
            raise RuntimeError("no profile is recorded: call start_profile first")
        folder, self.folder = self.folder, None
        jax.profiler.stop_trace()
        written = folder.glob("plugins/profile/*/perfetto_trace.json.gz")  # by JAX, a run each
        return max(written, key=lambda path: path.stat().st_mtime)

    @checked(PROFILE)
    def profile(self, is_start: bool = True, profile_prefix: str | Path | None = None) -> None:
        """Starts or ends a record, by vLLM's name. Ending none only warns.

        profile_prefix: its folder; where None, that of the one before.

        Raises:
          ValueError: a first record without a folder.
          RuntimeError: it records already.
        """
        if is_start:
            folder = profile_prefix or self._last
            if folder is None:
                raise ValueError("profile_prefix must name a folder the first time, got None")
            self.start(folder)
            self._last = folder
        elif self.folder is None:
            warnings.warn("no profile is recorded, so none is ended", stacklevel=3)
        else:
            self.stop()

    def step(self, output: SchedulerOutput) -> contextlib.AbstractContextManager:
        """Returns what names a step while it is launched, where one records."""
        if self.folder is None:
            return contextlib.nullcontext()
        self._num_steps += 1
        return jax.profiler.StepTraceAnnotation(step_name(output), step_num=self._num_steps)


def step_name(output: SchedulerOutput) -> str:
    """Returns execute_context_n(tokens)_generation_n(tokens).

    A context request is one that has no output yet.
    """
    counts, new = output.num_scheduled_tokens, {r.request_id for r in output.scheduled_new_reqs}

    def is_context(req_id: str) -> bool:
        if req_id in new or req_id not in output.requests:
            return req_id in new
        request = output.requests[req_id]  # its count is part of what it has computed
        return request.num_computed - counts[req_id] < len(request.prompt_token_ids)

    context = {req_id: count for req_id, count in counts.items() if is_context(req_id)}
    rest = sum(counts.values()) - sum(context.values())
    return (
        f"execute_context_{len(context)}({sum(context.values())})"
        f"_generation_{len(counts) - len(context)}({rest})"
    )


def check_device(timeout_s: float, devices: Sequence[Any] = ()) -> None:
    """Runs a tiny program on the default device, or on each of those that are given.

    Raises:
      RuntimeError: it did not end in `timeout_s`, or failed; names the device.
    """
    now: list[Any] = ["the device"]

    def run() -> None:
        for device in devices or [None]:
            now[0] = device or now[0]
            with jax.default_device(device):
                assert float(jnp.arange(8.0).sum()) == 28, "it adds wrongly"

    try:
        if ends_within(timeout_s, run):
            return
    except Exception as error:  # whatever a broken device makes JAX raise
        raise RuntimeError(f"{now[0]} cannot run a tiny program: restart the process") from error
    raise RuntimeError(f"{now[0]} did not run a tiny program in {timeout_s} s: restart the process")
