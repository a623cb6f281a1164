"""Workers of one model, each on devices of its own, and what is done on all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
import math
from typing import Any

import jax

from jaxrunner.loading.loader import Loaded
from jaxrunner.parallel.requirements import check_links
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.worker.lifecycle import Lifecycle
from jaxrunner.worker.memory_plan import MemoryPlan
from jaxrunner.worker.worker import Worker


class Workers(Lifecycle):
    """Workers with the same weights and sizes. What `Lifecycle` has is done on all that live."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        super().__init__()
        self.workers = list(workers)
        for worker in self.workers:  # whose engines look there
            worker.lora_versions = self.lora_versions

    @property
    def live(self) -> list[Worker]:
        """The workers whose device has not been lost; all of them where none is left."""
        return [w for w in self.workers if not w.status.ended] or self.workers

    @property
    def runner(self) -> ModelRunner:
        """The runner with the weights and caches of the first live worker."""
        return self.live[0].runner

    @property
    def runners(self) -> list[ModelRunner]:
        """The runners with the weights and caches of all live workers."""
        return [worker.runner for worker in self.live]

    @property
    def memory_plan(self) -> MemoryPlan:
        """The plan of each device's memory; the same for all workers."""
        return self.workers[0].memory_plan

    def read_checkpoint(self, **text: Any) -> Loaded:
        """Reads all of the checkpoint but its weights; the tokenizer once. Raises as `Worker`'s."""
        loaded = self.workers[0].read_checkpoint(**text)
        for worker in self.workers[1:]:
            worker.read_checkpoint(generation_config="vllm")  # the defaults are the first's to tell
        self.load_config = loaded.load_config
        return loaded

    def start(self, *, warm_up: Mapping[str, Any] | None, progress: bool = False) -> None:
        """Sets up what `read_checkpoint` has read, as `Worker.start` does.

        Threads compile for all while the first reads the weights, from which the others copy them.
        """
        for worker in self.workers:
            worker.init_device()
        first, *others = self.workers
        for worker in others:  # the first does so before it reads weights
            check_links(worker._loaded.config)
        first.plan_alike(others)
        for worker in self.workers:
            worker.initialize_from_config(trusted=True)
            worker.runner.profiler = self.runner.profiler  # there is one of a process
            if warm_up is not None:
                worker.runner.prepare(**warm_up)
        first.load_model(progress=progress)
        self._set_params(first.params)
        if warm_up is not None:
            for worker in self.workers:
                worker.compile_or_warm_up_model(progress=progress, **warm_up)

    def shutdown(self) -> None:
        """Gives the memory of all devices back."""
        for worker in self.workers:
            worker.shutdown()

    def loras_in_use(self) -> set[int]:
        """Returns the adapters of unfinished requests on all that live."""
        return {lora_id for worker in self.live for lora_id in worker.loras_in_use()}

    def _outdate(self, *, weights: bool) -> None:
        super()._outdate(weights=weights)
        for worker in self.workers:  # whose engines look there
            worker._outdate(weights=weights)


def make_worker(*args: Any, data_parallel_size: int = 1, **kwargs: Any) -> Worker | Workers:
    """Returns a worker, or several with devices of their own; one where experts lie over all.

    The other arguments are those of `Worker`.

    Raises:
      ValueError: there are fewer devices.
    """
    if (D := data_parallel_size) == 1:
        return Worker(*args, **kwargs)
    over_ranks = bool(kwargs.get("enable_expert_parallel"))
    names = "tensor_parallel_size", "pipeline_parallel_size"
    sizes = {name: kwargs[name] for name in names if kwargs.get(name, 1) > 1}
    N, devices = math.prod(sizes.values()), jax.local_devices()
    if over_ranks and D * N > len(devices):
        devices = jax.devices()
    if D * N > len(devices):
        more = "".join(f" with {name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"data_parallel_size={D}{more} needs {D * N} devices, there are {len(devices)} "
            f"({devices[0].device_kind}): lower one of them"
        )
    if over_ranks:
        return _over_ranks(D, devices[: D * N], Worker(*args, **kwargs))
    own = [devices[i * N : (i + 1) * N] for i in range(D)]
    return Workers([Worker(*args, devices=part, **kwargs) for part in own])


def _over_ranks(num: int, devices: Sequence[Any], worker: Worker) -> Worker:
    """Returns a worker that has read nothing yet, with experts over `num` data ranks."""
    parallel = replace(worker._load.keywords["parallel"], num_ranks=num, devices=devices)
    worker._load = partial(worker._load, parallel=parallel)
    return worker
