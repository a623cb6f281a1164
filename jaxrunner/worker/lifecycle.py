"""What a worker does beside its steps: new weights, sleep, records."""

import abc
from collections.abc import Iterable, Mapping
from dataclasses import replace
import os
from pathlib import Path
from typing import Any, cast

import jax

from jaxrunner import pytree
from jaxrunner.api.arguments import checked, forwarded
from jaxrunner.api.not_here import NotHere
from jaxrunner.loading import orbax_io, sharded_state, tensors
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.loading.weights import check_finite, check_leaves, check_tensors, like, with_tensors
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.parallel.processes import check_own, host_copy
from jaxrunner.parallel.requirements import check_sum
from jaxrunner.parallel.whole import copied, merge, merged_spec, whole_params
from jaxrunner.program import make_state
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.profiling import Profiler, check_device
from jaxrunner.speculators.drafter import Drafted
from jaxrunner.worker import lifecycle_arguments as arguments
from jaxrunner.worker.status import WorkerStatus

CHANGEABLE = dict(
    load_config=("load_format", "model_loader_extra_config"), model_config=("model", "revision")
)
TAGS = frozenset({"weights", "kv_cache"})  # what sleeps and wakes


class Lifecycle(NotHere, abc.ABC):
    """The methods of vLLM's worker by their names there, on one runner."""

    SAVED = ("weights_version", "cache_epoch")  # in a snapshot
    load_config = LoadConfig("")  # of `reload_weights`; this is no checkpoint's

    def __init__(self) -> None:
        self.status = WorkerStatus()
        self.weights_version = 0  # how often the weights have changed
        self.cache_epoch = 0  # of another one no key of the KV cache counts any more
        self._staged: dict[str, Any] | None = None  # tensors of an update that has started
        self._host_params: Any = None  # while the weights sleep on the host

    @property
    @abc.abstractmethod
    def runner(self) -> ModelRunner:
        """What holds weights and caches."""

    @property
    def runners(self) -> list[ModelRunner]:
        """All that hold these weights, each on devices of its own."""
        return [self.runner]

    def update_params(self, params: Any) -> None:
        """Takes new weights, a tree like `params`, between two steps; nothing is compiled anew.

        Arrays of the device are used as they are. Requests at work go on with the new weights;
        none to come shares what the prefix cache of an `LLM` has of the old ones.

        Raises:
          ValueError, TypeError: they are not like the old ones, which stay, or with `check_nan`
            not finite; names where.
        """
        self.status.check()
        if self.load_config.check_nan:
            params = like(params, self.runner.params_spec)
            check_leaves(params)
        self._set_params(params)
        self._outdate(weights=True)

    @property
    def params(self) -> Any:
        """The weights; None while they sleep."""
        return self.runner.params

    def start_weight_update(self) -> None:
        """Begins an update in parts: `update_weights` any number of times, `finish_weight_update`.

        Raises:
          RuntimeError: one has begun.
        """
        if self._staged is not None:
            raise RuntimeError("a weight update has begun: call finish_weight_update first")
        self._staged = {}

    def update_weights(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Copies tensors, by their names in a checkpoint, for the end of the update.

        weights: arrays of numpy, JAX or torch, of any device, in float32, 64, 16 or bfloat16.

        Raises:
          RuntimeError: none has begun.
          TypeError, ValueError: what is no tensor of the model, or with `check_nan` not finite;
            ends the update, and nothing changes.
        """
        if self._staged is None:
            raise RuntimeError("no weight update has begun: call start_weight_update first")
        staged, self._staged = self._staged, None
        self._staged = staged | self._read("weights", weights)

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

    def reload_weights(
        self, source: str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None
    ) -> None:
        """Takes the weights of a checkpoint: a folder, a name on the hub, or named tensors.

        None is the model's own, or what `update_config` says; it also says the format. Tensors are
        those that `update_weights` takes; what they do not name stays.

        Raises:
          FileNotFoundError, TypeError, ValueError: it is not like the model; nothing changes.
        """
        if source is not None and not isinstance(source, str | Path):
            named = self._read("source", source)
            if not named:
                raise ValueError("source has no tensor: name a folder, or give at least one tensor")
            self.update_params(self._with(named))
            return
        program, config = self.runner.program, self.load_config
        if source is not None:  # there are no dummies where a checkpoint is named
            format_ = "auto" if config.load_format == "dummy" else config.load_format
            config = replace(config, model=os.fspath(source), revision=None, load_format=format_)
        dtype = program.engine.dtype
        params = config.read(program.model, program.config, dtype=dtype, progress=False)
        self.update_params(params)

    def update_config(self, overrides: Mapping[str, Mapping[str, Any]]) -> None:
        """Changes what `reload_weights` reads, in vLLM's names.

        overrides: {"load_config": {"load_format", "model_loader_extra_config"}, "model_config":
            {"model", "revision"}}, or some of it.

        Raises:
          ValueError: another key, or a value that cannot be; nothing changes.
        """
        fields: dict[str, Any] = {}
        for name, values in arguments.read_overrides(overrides).items():
            arguments.check_changeable(name, values, CHANGEABLE.get(name, ()))
            fields |= values
        self.load_config = replace(self.load_config, **fields)

    @checked(arguments.IN_FOLDER)
    def save_params(self, folder: str | Path) -> None:
        """Writes the weights into a new folder, a tree like `params`, as orbax does.

        Raises:
          ValueError: the folder is there.
          RuntimeError: the weights sleep.
        """
        self._check_own("save_params")
        orbax_io.save(Path(folder), merge(self._awake(), self._whole))

    @checked(arguments.IN_FOLDER)
    def load_params(self, folder: str | Path) -> None:
        """Takes the weights that `save_params` wrote, or any program that knows orbax.

        Raises:
          FileNotFoundError, ValueError: they are not like the old ones, which stay; names where.
        """
        self._check_own("load_params")
        spec = self.runner.params_spec
        params = orbax_io.restore(Path(folder), merged_spec(spec, self._whole))
        self.update_params(copied(params, spec))

    @checked(arguments.SAVE_SHARDED_STATE)
    def save_sharded_state(
        self, path: str | Path, pattern: str | None = None, max_size: int | None = None
    ) -> None:
        """Writes the weights as `LLM(load_format="sharded_state")` reads them.

        config.json and the tokenizer's files are to be copied there too. Those of a drafter are not
        written: `speculative_config` names their checkpoint. pattern: names of files, with {part}
        in them; max_size: most bytes of weights in one.

        Raises:
          TypeError, ValueError: a bad argument, or such files are there.
          RuntimeError: the weights sleep.
        """
        self._check_own("save_sharded_state")
        params, config = self._awake(), cast(Any, self.runner.program.config)
        if isinstance(params, Drafted):
            params, config = params.target, config.target
        sharded_state.save(path, config, params, pattern=pattern, max_size=max_size)

    @checked(arguments.SLEEP)
    def sleep(self, level: int = 1) -> None:
        """Gives the device's memory to others, until `wake_up`. Programs stay.

        level: 1 keeps the weights on the host, 2 drops them: `update_params` or `reload_weights`
            must follow. KV caches are dropped, and with them all prefixes.

        Raises:
          TypeError, ValueError: there is no such level.
          RuntimeError: requests are at work, or it sleeps.
        """
        runners, status = self.runners, self.status
        if status.sleeping:
            raise RuntimeError(f"{' and '.join(sorted(status.sleeping))} sleep: wake_up first")
        status.check()
        if any(runner.requests.num_taken for runner in runners):
            raise RuntimeError("requests have slots: name them in finished_req_ids, then sleep")
        self._host_params = jax.tree.map(host_copy, self.params) if level == 1 else None
        for runner in runners:
            pytree.delete(runner.state)
            runner.params = runner.state = None
        status.sleeping, status.is_dropped = TAGS, level == 2
        self._outdate(weights=False)

    @checked(arguments.WAKE_UP)
    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Takes memory for what sleeps: "weights", "kv_cache", or all where `tags` is None.

        Raises:
          ValueError: a tag that does not sleep.
        """
        sleeping = self.status.sleeping
        wanted = sleeping if tags is None else frozenset(tags)
        if wanted - sleeping:
            asleep, rest = sorted(sleeping), sorted(wanted - sleeping)
            raise ValueError(f"tags may name what sleeps, {asleep}, got {rest}")
        if "kv_cache" in wanted:
            for runner in self.runners:
                runner.state = make_state(runner.program)
            self.status.sleeping -= {"kv_cache"}
        if "weights" in wanted and self._host_params is not None:
            self._set_params(self._host_params)  # the old ones: prefixes are as they were

    def is_sleeping(self) -> bool:
        """Whether something sleeps, so that no request can be added."""
        return bool(self.status.sleeping)

    start_profile = forwarded("runner.profiler", Profiler.start)
    stop_profile = forwarded("runner.profiler", Profiler.stop)
    profile = forwarded("runner.profiler", Profiler.profile)

    @checked(arguments.CHECK_HEALTH)
    def check_health(self, timeout_s: float = 10.0) -> None:
        """Runs a tiny program on each device, and one on all of a mesh.

        Raises:
          RuntimeError: one did not end in time, or failed.
        """
        for runner in self.runners:
            check_device(timeout_s, devices_of(runner.program.config))
            if (mesh := runner.program.mesh) is not None:
                check_sum(mesh, timeout_s)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns what the model can be asked for."""
        return ("generate",)

    def _set_params(self, params: Any) -> None:
        """Gives all runners weights, where others were or slept."""
        first, *others = self.runners
        placed = [like(params, first.params_spec)]
        for other in others:  # from device to device
            where = jax.tree.map(lambda x: x.sharding, other.params_spec)
            placed.append(jax.device_put(placed[0], where))
        for runner, its in zip(self.runners, placed, strict=True):
            runner.update_params(its)
        self.status.sleeping, self._host_params = self.status.sleeping - {"weights"}, None

    def _outdate(self, *, weights: bool) -> None:
        """Counts a change after which no key of the caches counts; `weights`: of the weights."""
        self.weights_version += weights
        self.cache_epoch += 1

    def _awake(self) -> Any:
        """Returns the weights that tensors are to be put among."""
        if self.params is None:
            raise RuntimeError("the weights sleep: wake_up first, or give all with update_params")
        return self.params

    def _check_own(self, asked: str) -> None:
        check_own(self.runner.program.mesh, asked, "reload_weights reads a checkpoint there too")

    @property
    def _whole(self) -> Any:
        """The shapes of the weights on one device."""
        program = self.runner.program
        return whole_params(program.model.params, program.config)

    def _read(self, name: str, given: Any) -> dict[str, Any]:
        """Returns tensors that are the model's, and with `check_nan` finite."""
        self._awake()
        found, program = tensors.read(name, given), self.runner.program
        check_tensors(program.model, program.config, found)
        if self.load_config.check_nan:
            check_finite(found)
        return found

    def _with(self, named: dict[str, Any]) -> Any:
        program = self.runner.program
        return with_tensors(program.model, program.config, self._awake(), named)
