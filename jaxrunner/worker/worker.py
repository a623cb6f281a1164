"""vLLM's worker by its method names, on the devices of one process, for a scheduler of your own.

worker = Worker("path/to/checkpoint", max_num_seqs=16)
worker.init_device()
worker.load_model()
page_bytes = sum(spec.page_size_bytes for spec in worker.get_kv_cache_spec().values())
worker.initialize_from_config(worker.determine_available_memory() // page_bytes)
worker.compile_or_warm_up_model()
worker.execute_model(scheduler_output)
output = worker.sample_tokens().get()
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
import time
from typing import Any

import jax

from jaxrunner import pytree
from jaxrunner.api.arguments import checked
from jaxrunner.api.speculative_config import SpeculativeConfig
from jaxrunner.caches.interleave import Interleave
from jaxrunner.config import EngineConfig
from jaxrunner.loading import llm_arguments
from jaxrunner.loading.loader import Loaded, load
from jaxrunner.loading.speculation import with_speculator
from jaxrunner.mixtures.eplb_config import EplbConfig
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.parallel.parallel_config import REPLICATED, ParallelConfig
from jaxrunner.parallel.requirements import check_links
from jaxrunner.programs.program_cache import find_folder
from jaxrunner.rule import Rule
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.profiling import check_device
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import with_logits_fn
from jaxrunner.worker import expert_balance
from jaxrunner.worker.kv_cache_spec import KVCacheSpec, kv_cache_specs
from jaxrunner.worker.lifecycle import Lifecycle
from jaxrunner.worker.memory_plan import MemoryPlan
from jaxrunner.worker.sizing import EnginePlan, plan_engine
from jaxrunner.worker.worker_steps import WorkerSteps


class Worker(WorkerSteps):
    """A model and its runner on the devices of one process, set up step by step, or by `start`.

    Settings are those of `LLM` that do not concern text. After `initialize_from_config` the
    methods of `Lifecycle` work too; the scheduler has to reset prefix caches.
    """

    warm_up: Mapping[str, Any] | None = None  # argument of `start`

    @checked(llm_arguments.WORKER, **llm_arguments.OF_WORKER)
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
        quantization: str | None = None,
        runner: str = "auto", pooler_config: Any = None, check_nan: bool = False,
        download_dir: str | Path | None = None, hf_token: str | bool | None = None,
        tensor_parallel_size: int = 1,
        decode_context_parallel_size: int = 1, cp_kv_cache_interleave_size: int = 1,
        pipeline_parallel_size: int = 1,
        enable_expert_parallel: bool = False, enable_return_routed_experts: bool = False,
        enable_eplb: bool = False, eplb_config: dict[str, Any] | None = None,
        all2all_backend: str = REPLICATED, all2all_token_threshold: int | None = None,
        rank: int | None = None, devices: Sequence[Any] | None = None,
        logits_fn: Callable[..., Any] | Rule | None = None,
        speculative_config: dict[str, Any] | None = None,
        cache_dir: str | Path | None = "auto",
        **sizes: Any,
    ):  # fmt: skip
        """rank: the only stage of a pipeline that this worker runs; None for all stages.
        devices: devices to choose from; None for those of this process.
        sizes: fields of `EngineConfig`, or of `sizing.plan_engine`.
        """
        super().__init__()
        rules = with_logits_fn(RULES, logits_fn)
        self._load = partial(
            load, model, revision=revision, dtype=dtype, seed=seed, load_format=load_format,
            model_loader_extra_config=model_loader_extra_config, hf_overrides=hf_overrides,
            check_nan=check_nan, download_dir=download_dir, hf_token=hf_token,
            quantization=quantization, enable_return_routed_experts=enable_return_routed_experts,
            runner=runner, pooler_config=pooler_config,
            parallel=ParallelConfig(
                tensor_parallel_size, pipeline_parallel_size, rank, devices,
                Interleave(decode_context_parallel_size, cp_kv_cache_interleave_size),
                enable_expert_parallel, EplbConfig.read(eplb_config, enable_eplb=enable_eplb),
                1, all2all_backend, all2all_token_threshold,
            ),
        )  # fmt: skip
        self._devices, asked = devices, speculative_config
        self._speculation = None if asked is None else SpeculativeConfig.read(asked)
        at = find_folder(cache_dir and str(cache_dir))
        self._plan = partial(plan_engine, seed=seed, rules=rules, cache_dir=at, **sizes)
        self._forget()

    @classmethod
    def of(cls, runner: ModelRunner) -> "Worker":
        """Returns the worker of a runner with weights of the caller's own, which `close` leaves."""
        worker = cls.__new__(cls)
        Lifecycle.__init__(worker)
        worker._forget()
        worker._runner = runner
        return worker

    def _forget(self) -> None:
        self._device: Any = None
        self._checkpoint: Loaded | None = None
        self._engine_plan: EnginePlan | None = None
        self._runner: ModelRunner | None = None
        self.status.sleeping, self._host_params, self._staged = frozenset(), None, None

    def read_checkpoint(self, **text: Any) -> Loaded:
        """Reads all of the checkpoint but its weights. `text`: what `load` takes for a tokenizer.

        Raises:
          FileNotFoundError, ValueError: the checkpoint or a setting is bad; names it.
        """
        loaded = self._load(**text)
        self._checkpoint = (
            with_speculator(loaded, self._speculation) if self._speculation else loaded
        )
        self.load_config = self._checkpoint.load_config
        return self._checkpoint

    def start(self, *, warm_up: Mapping[str, Any] | None, progress: bool = False) -> None:
        """Sets up the checkpoint of `read_checkpoint` for our own scheduler.

        Threads compile while the weights are read.

        warm_up: arguments of `compile_or_warm_up_model`; None compiles programs when first used.
        """
        self.warm_up = warm_up
        self.init_device()
        self.initialize_from_config(trusted=True)
        if warm_up is not None:
            self.runner.prepare(**warm_up)
        self.load_model(progress=progress)
        if warm_up is not None:
            self.compile_or_warm_up_model(progress=progress, **warm_up)

    def cut_anew(self, **devices: Any) -> Loaded:
        """Returns the checkpoint with other fields of its `ParallelConfig`, and raises as it."""
        parallel = replace(self._load.keywords["parallel"], **devices)
        loaded = self._load(parallel=parallel, generation_config="vllm")
        return with_speculator(loaded, self._speculation) if self._speculation else loaded

    def restart(self, loaded: Loaded, config: EngineConfig) -> None:
        """Sets up the checkpoint from `cut_anew`, without weights, in place of the old one."""
        self.shutdown()
        sizes: dict[str, Any] = dict(
            num_blocks=config.num_blocks, max_model_len=config.max_model_len
        )
        sizes |= dict.fromkeys(("kv_cache_memory_bytes", "gpu_memory_utilization"))
        self._plan, self._checkpoint = partial(self._plan, **sizes), loaded
        self.init_device()
        self.initialize_from_config(trusted=True)

    def init_device(self) -> None:
        """Takes the first of its devices and runs a trial on it; `load_model` tries all devices.

        Raises:
          RuntimeError: the device does not work.
        """
        self._device = jax.local_devices()[0] if self._devices is None else self._devices[0]
        check_device(timeout_s=60.0, devices=[self._device])

    def load_model(self, *, progress: bool = False) -> None:
        """Loads the weights, into the runner if there is one.

        Raises:
          RuntimeError: `init_device` was not called, or several devices cannot reach each other.
          FileNotFoundError, ValueError: the checkpoint or a setting is bad; names it.
        """
        if self._device is None:
            raise RuntimeError("load_model needs a device: call init_device first")
        loaded = self._checkpoint or self.read_checkpoint()
        check_links(loaded.config)
        params = loaded.read_params(progress=progress)
        if self._runner is None:
            self._checkpoint = loaded._replace(params=params)
        else:
            self._set_params(params)

    def determine_available_memory(self) -> int:
        """Returns the bytes that KV caches may take: what weights, tables and programs leave.

        Raises:
          RuntimeError: `load_model` was not called.
          ValueError, MemoryError: as `plan_engine`.
        """
        return self.memory_plan.kv

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan of the device's memory; raises as `determine_available_memory`."""
        return self._planned.memory

    def plan_alike(self, others: Sequence["Worker"]) -> None:
        """Plans engines of one size for this and other workers: one that fits each device."""
        beside = [device for other in others for device in devices_of(other._loaded.config)]
        plan = self._engine_plan = self._plan(self._loaded, beside=beside)
        for other in others:
            model, config, params, *_ = other._loaded
            other._engine_plan = plan._replace(built=plan.built.on(model, config, params))

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Returns what each layer keeps, by its name in vLLM.

        Raises:
          RuntimeError: `load_model` was not called.
        """
        return kv_cache_specs(self._loaded.config, self._planned.config)

    @checked({"num_blocks": llm_arguments.SIZES["num_blocks"]})
    def initialize_from_config(
        self, num_blocks: int | None = None, *, trusted: bool = False
    ) -> None:
        """Makes the runner, with its tables and KV caches.

        num_blocks: blocks of layers that keep all tokens; those of others follow
            (`runner.program.cache_groups`). None for what fits `determine_available_memory`.
        trusted: steps come from our own scheduler, and are not checked.

        Raises:
          RuntimeError: `load_model` was not called, or there is a runner already.
          ValueError, MemoryError: as `plan_engine`.
        """
        if self._runner is not None:
            raise RuntimeError("initialize_from_config was called: shutdown first")
        (config, _, built), loaded = self._planned, self._loaded
        if num_blocks is not None:
            built = built.resized(replace(config, num_blocks=num_blocks))
        self._runner = ModelRunner(built, loaded.params, trusted=trusted)
        self._checkpoint = loaded._replace(params=None)  # held here they would never sleep

    def compile_or_warm_up_model(self, **kwargs: Any) -> float:
        """Compiles programs; kwargs: arguments of `ModelRunner.warm_up`.

        Returns the seconds that it took.

        Raises:
          RuntimeError: `initialize_from_config` was not called.
          MemoryError: a program takes more than was planned for it.
        """
        start_s = time.monotonic()
        self.runner.warm_up(**kwargs)
        expert_balance.warm_up(self.runner)
        memory = self.memory_plan.checked(self.runner.programs.largest())
        self._engine_plan = self._planned._replace(memory=memory)
        return time.monotonic() - start_s

    def shutdown(self) -> None:
        """Frees the device memory. May be called twice; `init_device` can follow."""
        if self._runner is not None and self._runner.profiler.folder is not None:
            self._runner.profiler.stop()
        self.close()
        self._forget()

    def close(self) -> None:
        """Frees the device memory, that of weights that it loaded too; no step can follow."""
        if self._runner is not None:
            self._runner.close()
        if self._checkpoint is not None:
            pytree.delete((self._checkpoint.params, self._runner and self._runner.params))

    @property
    def runner(self) -> ModelRunner:
        """The runner, which holds weights and caches.

        Raises:
          RuntimeError: there is no runner yet.
        """
        if self._runner is None:
            raise RuntimeError("the worker has no runner: call initialize_from_config first")
        return self._runner

    @property
    def _loaded(self) -> Loaded:
        if self._checkpoint is None:
            raise RuntimeError("the worker has no model: call load_model first")
        return self._checkpoint

    @property
    def _planned(self) -> EnginePlan:
        """The engine's sizes, memory plan and programs; computed once."""
        if self._engine_plan is None:
            self._engine_plan = self._plan(self._loaded)
        return self._engine_plan
