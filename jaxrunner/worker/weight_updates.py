"""New weights for a worker: whole, in parts, of a checkpoint or of files that it wrote."""

import abc
from collections.abc import Iterable, Mapping
from dataclasses import replace
import os
from pathlib import Path
from typing import Any, cast

import jax

from jaxrunner.api.arguments import checked
from jaxrunner.api.not_here import NotHere
from jaxrunner.loading import orbax_io, sharded_state, tensors
from jaxrunner.loading.declared import own_dtypes, wanted_tensors
from jaxrunner.loading.loader import LoadConfig
from jaxrunner.loading.stacked_experts import unstacked
from jaxrunner.loading.weights import check_finite, check_leaves, check_tensors, like, with_tensors
from jaxrunner.parallel.pipeline import refuse_spread
from jaxrunner.parallel.whole import copied, merge, merged_spec, whole_params
from jaxrunner.quantization.per_channel import of_floats
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.scheduling.stateful import Stateful
from jaxrunner.speculators.drafter import Drafted
from jaxrunner.worker import lifecycle_arguments as arguments
from jaxrunner.worker.expert_balance import in_order
from jaxrunner.worker.status import WorkerStatus

CHANGEABLE = dict(
    load_config=("load_format", "model_loader_extra_config"), model_config=("model", "revision")
)


class WeightUpdates(NotHere, Stateful, abc.ABC):
    """The methods that take new weights, and write them, by the names of vLLM's worker."""

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
        """The runner that holds the weights and caches."""

    @property
    def runners(self) -> list[ModelRunner]:
        """All that hold these weights, each on devices of its own."""
        return [self.runner]

    def update_params(self, params: Any) -> None:
        """Installs new weights, a tree like `params`, between two steps; nothing is recompiled.

        Arrays of the device are used as they are; float weights of products that `quantization`
        holds in 8 bits are rounded to these. Requests at work go on with the new weights; none to
        come shares what the prefix cache of an `LLM` has of the old ones.

        Raises:
          ValueError, TypeError: they are not like the old ones, which stay, or with `check_nan`
            not finite; names where.
        """
        self.status.check()
        params = of_floats(params, self.runner.params_spec)
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

        weights: arrays of numpy, JAX or torch, of any device, in float32, 64, 16 or bfloat16, or
            as a quantised checkpoint stores them.

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
          ValueError: the folder is there, or not seen by all processes of the mesh.
          RuntimeError: the weights sleep.
        """
        refuse_spread(self.runner.program.config, "save_params", "have one process read them all")
        params = merge(self._awake(), self._whole)
        orbax_io.save(Path(folder), params, self.runner.program.mesh)

    @checked(arguments.IN_FOLDER)
    def load_params(self, folder: str | Path) -> None:
        """Takes the weights that `save_params` wrote, or any program that knows orbax.

        Raises:
          FileNotFoundError, ValueError: they are not like the old ones, which stay; names where.
        """
        spec, mesh = self.runner.params_spec, self.runner.program.mesh
        refuse_spread(self.runner.program.config, "load_params", "take reload_weights")
        params = orbax_io.restore(Path(folder), merged_spec(spec, self._whole), mesh)
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
        params, config = self._awake(), cast(Any, self.runner.program.config)
        refuse_spread(config, "save_sharded_state", "have one process read them all")
        if isinstance(params, Drafted):
            params, config = params.target, config.target
        sharded_state.save(path, config, params, pattern=pattern, max_size=max_size)

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
        return in_order(self.runner)

    @property
    def _whole(self) -> Any:
        """The shapes of the weights on one device."""
        program = self.runner.program
        return whole_params(program.model.params, program.config)

    def _read(self, name: str, given: Any) -> dict[str, Any]:
        """Returns tensors that are the model's, and with `check_nan` finite."""
        self._awake()
        program = self.runner.program
        found = tensors.read(name, given, own_dtypes(program.model, program.config))
        found = unstacked(found, wanted_tensors(program.model, program.config))
        check_tensors(program.model, program.config, found)
        if self.load_config.check_nan:
            check_finite(found)
        return found

    def _with(self, named: dict[str, Any]) -> Any:
        program = self.runner.program
        return with_tensors(program.model, program.config, self._awake(), named)
