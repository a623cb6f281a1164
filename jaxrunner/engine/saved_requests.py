"""What `Lifecycle` is of an engine, and requests at work in a folder."""

import abc
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxrunner.api.arguments import checked
from jaxrunner.api.outputs import RequestOutput
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.engine import Engine
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.worker.lifecycle import Lifecycle
from jaxrunner.worker.lifecycle_arguments import IN_FOLDER, check_changeable, read_overrides

CHANGEABLE = ("async_depth", "num_decode_steps")


class EngineLifecycle(Lifecycle):
    """The part of `LLM` that is not about prompts."""

    engine: Engine
    completions: Completions

    @property
    def runner(self) -> ModelRunner:
        """What holds weights and caches."""
        return self.engine.runner

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.engine.weights_version

    def update_config(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes settings in which nothing is compiled; see `Lifecycle.update_config`.

        "engine_config" may have `async_depth`, and `num_decode_steps` of 1 or what it was at first.
        """
        load = read_overrides(overrides)
        mine = load.pop("engine_config", {})
        check_changeable("engine_config", mine, CHANGEABLE)
        config = replace(self.engine.config, **mine)
        first = self.runner.program.engine.num_decode_steps
        if config.num_decode_steps not in (1, first):
            raise ValueError(
                f"num_decode_steps={config.num_decode_steps} was not compiled, 1 and {first} can "
                "be set: build a new one with it"
            )
        super().update_config(load)
        self.engine.config = config

    def shutdown(self) -> None:
        """Gives the device memory back, by vLLM's name; see `close`."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the device memory back. May be called twice; no request can follow."""

    @checked(IN_FOLDER)
    def save_state(self, folder: str | Path) -> None:
        """Writes all requests at work, caches included, into a new folder; they can go on."""
        self.completions.save(folder)

    @checked(IN_FOLDER)
    def restore_state(self, folder: str | Path) -> Iterator[RequestOutput]:
        """Takes up what `save_state` wrote, and returns what is to be told of it, as `stream` does.

        The LLM must be like the one that wrote it, and have no request at work. Errors are those
        of `snapshot.restore_engine`; nothing changes then.
        """
        return self.completions.stream(self.completions.restore(folder))

    def _set_params(self, params: Any) -> None:
        self.engine.update_params(params)

    def _quiesce(self) -> None:
        if self.engine.has_unfinished:
            raise RuntimeError("requests are at work: finish or abort them, then sleep")
        while self.engine.step():
            pass  # of requests that have ended
        self.engine.reset_prefix_cache()

    def _on_sleep(self, reason: str) -> None:
        self.engine.status.asleep = reason
