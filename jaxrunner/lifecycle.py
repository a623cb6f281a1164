"""New weights for a model at work, and sleep: what a trainer in the same process needs of `LLM`."""

import abc
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrunner import array_store, sharded_state
from jaxrunner.bounds import shown
from jaxrunner.completions import Completions
from jaxrunner.engine import Engine
from jaxrunner.hub import resolve
from jaxrunner.layout import make_state
from jaxrunner.outputs import RequestOutput
from jaxrunner.profiling import check_device
from jaxrunner.weights import check_tensors, load_params, with_tensors

TAGS = frozenset({"weights", "kv_cache"})  # what sleeps and wakes


class Lifecycle(abc.ABC):
    """The methods of vLLM's worker by their names there."""

    engine: Engine
    completions: Completions
    _staged: dict[str, Any] | None = None  # tensors of an update that has started
    _asleep: frozenset[str] = frozenset()  # of `TAGS`
    _host_params: Any = None  # while the weights sleep on the host

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.engine.weights_version

    def update_params(self, params: Any) -> None:
        """Takes new weights, a tree like `params`, between two steps; nothing is compiled anew.

        Arrays of the device are used as they are. Requests at work go on with the new weights;
        none to come shares what the prefix cache has of the old ones.

        Raises:
          ValueError, TypeError: they are not like the old ones, which stay; names where.
        """
        self.engine.update_params(params)
        self._asleep, self._host_params = self._asleep - {"weights"}, None
        self._tell()

    @property
    def params(self) -> Any:
        """The weights; None while they sleep."""
        return self.engine.runner.params

    def start_weight_update(self) -> None:
        """Begins an update in parts: `update_weights` any number of times, `finish_weight_update`.

        Raises:
          RuntimeError: one has begun.
        """
        if self._staged is not None:
            raise RuntimeError("a weight update has begun: call finish_weight_update first")
        self._staged = {}

    def update_weights(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Keeps tensors, by their names in a checkpoint, for the end of the update.

        Raises:
          RuntimeError: none has begun.
          ValueError: a tensor that the model does not have; ends the update, and nothing changes.
        """
        if self._staged is None:
            raise RuntimeError("no weight update has begun: call start_weight_update first")
        staged, self._staged = self._staged, None
        new = {name: np.asarray(tensor) for name, tensor in dict(tensors).items()}
        self._awake()
        program = self.engine.runner.program
        check_tensors(program.model, program.config, new)
        self._staged = staged | new

    def finish_weight_update(self) -> None:
        """Takes the new weights, those that were not named being as they were.

        Raises:
          RuntimeError: none has begun.
          ValueError: values that the dtype does not hold; ends the update, and nothing changes.
        """
        if self._staged is None:
            raise RuntimeError("no weight update has begun: call start_weight_update first")
        staged, self._staged = self._staged, None
        self.update_params(self._with(staged))

    def reload_weights(self, source: str | Path | Iterable[tuple[str, Any]]) -> None:
        """Takes the weights of a checkpoint: a folder, a name on the hub, or named tensors.

        Raises:
          FileNotFoundError, ValueError: it is not like the model; nothing changes.
        """
        if not isinstance(source, str | Path):
            self.update_params(self._with({name: np.asarray(x) for name, x in source}))
            return
        program = self.engine.runner.program
        self.update_params(
            load_params(
                resolve(str(source)), program.model, program.config, dtype=program.engine.dtype,
                progress=False,
            )
        )  # fmt: skip

    def save_params(self, folder: str | Path) -> None:
        """Writes the weights into a new folder, a tree like `params`, as orbax does.

        Raises:
          ValueError: the folder is there.
          RuntimeError: the weights sleep.
        """
        array_store.save(Path(folder), self._awake())

    def load_params(self, folder: str | Path) -> None:
        """Takes the weights that `save_params` wrote, or any program that knows orbax.

        Raises:
          FileNotFoundError, ValueError: they are not like the old ones, which stay; names where.
        """
        self.update_params(array_store.restore(Path(folder), self.engine.runner.params_spec))

    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Writes the weights as `LLM(load_format="sharded_state")` reads them.

        config.json and the tokenizer's files are to be copied there too. pattern: names of files,
        with {part} in them; max_size: most bytes of weights in one.

        Raises:
          TypeError, ValueError: a bad argument, or such files are there.
          RuntimeError: the weights sleep.
        """
        sharded_state.save(path, self._awake(), pattern=pattern, max_size=max_size)

    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory to others, until `wake_up`. Programs stay.

        level: 1 keeps the weights on the host, 2 drops them: `update_params` or `reload_weights`
            must follow. KV caches are dropped, and with them all prefixes.

        Raises:
          ValueError: there is no such level.
          RuntimeError: requests are at work, or it sleeps.
        """
        if level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {shown(level)}")
        if self._asleep:
            raise RuntimeError(f"{' and '.join(sorted(self._asleep))} sleep: wake_up first")
        if self.engine.has_unfinished:
            raise RuntimeError("requests are at work: finish or abort them, then sleep")
        while self.engine.step():
            pass  # of requests that have ended
        self.engine.reset_prefix_cache()
        runner = self.engine.runner
        self._host_params = jax.device_get(runner.params) if level == 1 else None
        for array in jax.tree.leaves(runner.state):
            array.delete()
        runner.params = runner.state = None
        self._asleep = TAGS
        self._tell()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory for what sleeps: "weights", "kv_cache", or all where `tags` is None.

        Raises:
          ValueError: a tag that does not sleep.
        """
        wanted = self._asleep if tags is None else frozenset(tags)
        if wanted - self._asleep:
            asleep, rest = sorted(self._asleep), sorted(wanted - self._asleep)
            raise ValueError(f"tags may name what sleeps, {asleep}, got {rest}")
        runner = self.engine.runner
        if "kv_cache" in wanted:
            runner.state = make_state(runner.program)
            self._asleep -= {"kv_cache"}
        if "weights" in wanted and self._host_params is not None:
            runner.update_params(self._host_params)  # the old ones: prefixes are as they were
            self._asleep, self._host_params = self._asleep - {"weights"}, None
        self._tell()

    def is_sleeping(self) -> bool:
        """Whether something sleeps, so that no request can be added."""
        return bool(self._asleep)

    def save_state(self, folder: str | Path) -> None:
        """Writes all requests at work, caches included, into a new folder; they can go on."""
        self.completions.save(folder)

    def restore_state(self, folder: str | Path) -> Iterator[RequestOutput]:
        """Takes up what `save_state` wrote, and returns what is to be told of it, as `stream` does.

        The LLM must be like the one that wrote it, and have no request at work. Errors are those
        of `snapshot.restore_engine`; nothing changes then.
        """
        return self.completions.stream(self.completions.restore(folder))

    def start_profile(self, folder: str | Path) -> None:
        """Records what host and device do, until `stop_profile`; steps are named as vLLM's.

        Raises:
          RuntimeError: it records already.
        """
        self.engine.runner.profiler.start(folder)

    def stop_profile(self) -> Path:
        """Ends the record. Returns the file that ui.perfetto.dev opens.

        Raises:
          RuntimeError: nothing is recorded.
        """
        return self.engine.runner.profiler.stop()

    def check_health(self, timeout_s: float = 10.0) -> None:
        """Runs a tiny program on the device.

        Raises:
          RuntimeError: it did not end in time, or failed.
        """
        check_device(timeout_s)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns what the model can be asked for."""
        return ("generate",)

    def _tell(self) -> None:
        """Tells the engine why nothing can run."""
        reason = ""
        if self._asleep:
            reason = f"{' and '.join(sorted(self._asleep))} sleep: call wake_up"
            if "weights" in self._asleep and self._host_params is None:
                reason += ", and update_params or reload_weights, as the weights were dropped"
        self.engine.asleep = reason

    def _awake(self) -> Any:
        """Returns the weights that tensors are to be put among."""
        if self.params is None:
            raise RuntimeError("the weights sleep: wake_up first, or give all with update_params")
        return self.params

    def _with(self, tensors: dict[str, Any]) -> Any:
        program = self.engine.runner.program
        return with_tensors(program.model, program.config, self._awake(), tensors)
