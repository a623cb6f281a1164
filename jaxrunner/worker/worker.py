"""vLLM's worker by its method names, on one device, for a scheduler of your own.

worker = Worker("path/to/checkpoint", max_num_seqs=16)
worker.init_device()
worker.load_model()
page_bytes = sum(spec.page_size_bytes for spec in worker.get_kv_cache_spec().values())
worker.initialize_from_config(worker.determine_available_memory() // page_bytes)
worker.compile_or_warm_up_model()
worker.execute_model(scheduler_output)
output = worker.sample_tokens().get()
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.api.arguments import checked
from jaxrunner.config import EngineConfig
from jaxrunner.loading import llm_arguments
from jaxrunner.loading.loader import Loaded, load
from jaxrunner.program import engine_groups
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.profiling import check_device
from jaxrunner.runner.program_cache import find_folder
from jaxrunner.runner.step_handle import StepHandle
from jaxrunner.scheduling.request import GrammarOutput, SchedulerOutput
from jaxrunner.worker.lifecycle import Lifecycle
from jaxrunner.worker.memory_plan import MemoryPlan, num_bytes
from jaxrunner.worker.sizing import plan_engine


class KVCacheSpec(NamedTuple):
    """What one layer keeps of its keys and values."""

    block_size: int  # tokens
    num_kv_heads: int
    head_size: int
    dtype: str
    sliding_window: int | None  # keys a token sees, None for all before it
    page_size_bytes: int  # of one block, scales included


class Worker(Lifecycle):
    """A device, a model on it, and its runner, set up step by step.

    Settings are those of `LLM` that do not concern text. After `initialize_from_config` the
    methods of `Lifecycle` work too; prefix caches are the scheduler's to reset.
    """

    @checked(
        llm_arguments.MODEL | llm_arguments.SIZES,
        elsewhere=llm_arguments.ELSEWHERE,
        renamed=llm_arguments.RENAMED,
        spelled=llm_arguments.SPELLED,
    )
    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        seed: int = 0,
        load_format: str = "auto",
        model_loader_extra_config: dict[str, Any] | None = None,
        hf_overrides: dict[str, Any] | None = None,
        check_nan: bool = False,
        download_dir: str | Path | None = None,
        hf_token: str | bool | None = None,
        cache_dir: str | Path | None = "auto",
        **sizes: Any,
    ):
        """sizes: fields of `EngineConfig`, or of `sizing.plan_engine`."""
        self._load = partial(
            load, model, revision=revision, dtype=dtype, seed=seed, load_format=load_format,
            model_loader_extra_config=model_loader_extra_config, hf_overrides=hf_overrides,
            check_nan=check_nan, download_dir=download_dir, hf_token=hf_token,
        )  # fmt: skip
        self._sizes: dict[str, Any] = sizes | dict(seed=seed)
        self._cache_dir = find_folder(cache_dir and str(cache_dir))
        self._device: Any = None
        self._loaded_model: Loaded | None = None
        self._plan: tuple[EngineConfig, MemoryPlan] | None = None
        self._runner: ModelRunner | None = None

    def init_device(self) -> None:
        """Takes the first device of this process, and tries whether it works.

        Raises:
          RuntimeError: it does not.
        """
        check_device(timeout_s=60.0)
        self._device = jax.local_devices()[0]

    def load_model(self) -> None:
        """Loads the weights.

        Raises:
          RuntimeError: `init_device` was not called.
          FileNotFoundError, ValueError: the checkpoint or a setting is bad; names it.
        """
        if self._device is None:
            raise RuntimeError("load_model needs a device: call init_device first")
        loaded = self._load()
        self._loaded_model = loaded._replace(params=loaded.read_params(progress=False))
        self.load_config = loaded.load_config

    def determine_available_memory(self) -> int:
        """Returns the bytes that KV caches may take: what weights, tables and programs leave.

        Raises:
          RuntimeError: `load_model` was not called.
          ValueError, MemoryError: as `plan_engine`.
        """
        return self._planned[1].kv

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns what each layer keeps, by its name in vLLM.

        Raises:
          RuntimeError: `load_model` was not called.
        """
        (config, _), model = self._planned, self._loaded.config
        kv: dict[str, Any] = dict(kv=jnp.dtype(config.kv_dtype), scaled=config.scaled)
        dims, specs = model.dims | kv, {}
        for group in engine_groups(model, config):
            sizes = dims | group.kind.dims | dict(N=1, S=group.block_size)
            page_bytes = num_bytes(pytree.abstract(group.kind.leaves, sizes))
            spec = KVCacheSpec(
                group.block_size, dims["K"], dims["D"], config.kv_dtype,
                getattr(group.kind, "window", None), page_bytes,
            )  # fmt: skip
            specs |= {f"model.layers.{i}.self_attn.attn": spec for i in group.layers}
        return dict(sorted(specs.items(), key=lambda item: int(item[0].split(".")[2])))

    @checked({"num_blocks": llm_arguments.SIZES["num_blocks"]})
    def initialize_from_config(self, num_blocks: int | None = None) -> None:
        """Makes the runner, with its tables and KV caches.

        num_blocks: of each layer; None for what `determine_available_memory` holds.

        Raises:
          RuntimeError: `load_model` was not called, or this was.
          ValueError, MemoryError: as `plan_engine`.
        """
        if self._runner is not None:
            raise RuntimeError("initialize_from_config was called: shutdown first")
        (config, _), loaded = self._planned, self._loaded
        if num_blocks is not None:
            config = replace(config, num_blocks=num_blocks)
        self._runner = ModelRunner(
            loaded.model, loaded.config, config, loaded.params, cache_dir=self._cache_dir
        )

    def compile_or_warm_up_model(self) -> float:
        """Compiles what usual requests need. Returns the seconds it took.

        Raises:
          RuntimeError: `initialize_from_config` was not called.
          MemoryError: a program takes more than was planned for it.
        """
        start_s = time.monotonic()
        self.runner.warm_up()
        config, plan = self._planned
        self._plan = config, plan.checked(self.runner.programs.largest())
        return time.monotonic() - start_s

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Starts the forward pass of a step, as `ModelRunner.execute_model` does.

        Raises:
          RuntimeError: weights or caches sleep, or a step was not sampled.
        """
        if self.is_sleeping():
            raise RuntimeError(self._reason())
        self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> StepHandle:
        """Samples that step; `get` of what it returns waits for the tokens."""
        return self.runner.sample_tokens(grammar_output)

    def shutdown(self) -> None:
        """Gives the device memory back. May be called twice; `init_device` can follow."""
        runner, loaded = self._runner, self._loaded_model
        self._device = self._loaded_model = self._plan = self._runner = None
        self._asleep, self._host_params, self._staged = frozenset(), None, None
        if runner is not None:
            if runner.profiler.folder is not None:
                runner.profiler.stop()
            runner.close()
        pytree.delete(runner.params if runner is not None else loaded and loaded.params)

    @property
    def runner(self) -> ModelRunner:
        """What holds weights and caches.

        Raises:
          RuntimeError: there is none yet.
        """
        if self._runner is None:
            raise RuntimeError("the worker has no runner: call initialize_from_config first")
        return self._runner

    @property
    def _loaded(self) -> Loaded:
        if self._loaded_model is None:
            raise RuntimeError("the worker has no model: call load_model first")
        return self._loaded_model

    @property
    def _planned(self) -> tuple[EngineConfig, MemoryPlan]:
        """The engine's sizes, and where memory goes; worked out once."""
        if self._plan is None:
            self._plan = plan_engine(self._loaded, cache_dir=self._cache_dir, **self._sizes)
        return self._plan

    def _set_params(self, params: Any) -> None:
        self.runner.update_params(params)

    def _quiesce(self) -> None:
        if self.runner.requests.num_taken:
            raise RuntimeError("requests have slots: name them in finished_req_ids, then sleep")

    def _on_sleep(self, reason: str) -> None:
        """Tells nobody: `execute_model` asks."""
