"""Data parallelism: engines with devices and requests of their own, behind one interface."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
from pathlib import Path
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.config import EngineConfig
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.interrupts import deferred
from jaxrunner.engine.request_check import check_among, check_ids, check_reason, new_request
from jaxrunner.engine.snapshots.snapshot import (
    Restored,
    check_snapshot,
    restore_engine,
    save_engine,
)
from jaxrunner.engine.steps import launch_all, wait_for_one
from jaxrunner.loading.new_folder import new_folder
from jaxrunner.lora.lora_request import check_lora_request
from jaxrunner.parallel.mesh import devices_of
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.step_handle import NewTokens
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.router import Router
from jaxrunner.worker.worker import Worker
from jaxrunner.worker.workers import Workers


class Replicas:
    """Engines of one model and size behind the methods of `Engine`, driven by one thread.

    Tokens are those of one engine, as seeds are drawn in the order of `add`. An engine whose device
    fails ends with its requests; later requests go to the others.
    """

    def __init__(self, workers: Workers, *, make_compiler: Callable[[], Any] | None = None) -> None:
        """make_compiler: as for `Engine`; all engines share the compiler."""
        shared = make_compiler and functools.cache(make_compiler)
        self.worker, self.status = workers, workers.status
        self.engines = [Engine.of(worker, make_compiler=shared) for worker in workers.workers]
        first = self.engines[0]
        self.model_config = first.model_config
        self._share_seeds(np.random.default_rng(first.config.seed))
        self.router = Router(
            len(self.engines),
            block_size=first.config.block_size,
            margin=first.config.max_num_batched_tokens,  # a prefix is worth one step of waiting
            by_prefix=first.config.enable_prefix_caching,
        )
        self._epoch = workers.cache_epoch
        self._gained: NewTokens = []  # read before another engine raised, not yet returned

    @property
    def live(self) -> list[Engine]:
        """The engines that have not ended."""
        return [engine for engine in self.engines if not engine.status.ended]

    @property
    def runner(self) -> ModelRunner:
        """The runner of the first live engine; all have the same weights and programs."""
        return self.worker.runner

    @property
    def config(self) -> EngineConfig:
        """The sizes of each engine."""
        return self.engines[0].config

    @config.setter
    def config(self, config: EngineConfig) -> None:
        for engine in self.engines:
            engine.config = config

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return any(engine.has_unfinished for engine in self.engines)

    @property
    def weights_version(self) -> int:
        """How often the weights have changed."""
        return self.worker.weights_version

    def add(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, **asked: Any
    ) -> Request:
        """Queues a request, as `Engine.add` does; raises as it."""
        self._check()
        self.status.check_awake()
        program = self.runner.program
        adapter = check_lora_request(asked.pop("lora_request", None))
        asked["lora_id"] = 0 if adapter is None else adapter.lora_int_id
        request = new_request(request_id, prompt_token_ids, params, of=program, **asked)
        if self._epoch != self.worker.cache_epoch:
            self._epoch = self.worker.cache_epoch
            self.router.forget()
        related = {request.request_id}
        if isinstance(request.prefix_from, Request):
            related.add(request.prefix_from.request_id)
        of_each = [engine.unfinished for engine in self.engines]
        home = next((i for i, of in enumerate(of_each) if any(r in of for r in related)), None)
        check_among(request, {} if home is None else of_each[home])
        self.engines[home or 0].grammars.check(request.params)
        self.worker.take_lora(adapter)  # once nothing else can refuse the request
        if home is not None:
            self.engines[home].queue(request)
            self.router.follow(request, home)
            return request
        chosen = self.router.choose(
            request, [i for i, engine in enumerate(self.engines) if not engine.status.ended]
        )
        try:
            self.engines[chosen].queue(request)
        except BaseException:
            self.router.drop(request.request_id)
            raise
        return request

    @deferred
    def begin(self) -> None:
        """Launches steps on each device, and waits for no grammar. Raises as `Engine.launch`."""
        self._check()
        launch_all(self.live)

    @deferred
    def step(self) -> NewTokens:
        """Launches steps on each device, and reads those that are done, at least one if any runs.

        Returns and raises as `Engine.step`.
        """
        self._check()
        launch_all(self.live)
        busy = [engine for engine in self.engines if engine.oldest is not None]
        waiting = [engine for engine in self.engines if engine.grammars.num_waiting]
        if not busy and waiting:
            waiting[0].launch(block=True)
        for engine in wait_for_one(busy):
            engine.read()
        return self._take_gained()

    @deferred
    def drain(self) -> NewTokens:
        """Reads all launched steps and waits for grammars; launches none. As `Engine.drain`."""
        for engine in self.live:
            self._gained += engine.drain()
        return self._take_gained()

    def _take_gained(self) -> NewTokens:
        for engine in self.engines:  # also an ended one, whose last requests have errors
            self._gained += engine.take_gained()
        gained, self._gained = self._gained, []
        for request, _ in gained:
            self.router.observe(request)
        return gained

    def _check(self) -> None:
        """Checks that an engine is live; raises as `WorkerStatus.check`."""
        if not self.status.ended and not self.live:
            self.status.ended = self.engines[0].status.ended
        self.status.check()

    def finish(self, request_ids: Iterable[str], reason: str, stop_reason: Any = None) -> None:
        """Ends requests at any phase; ids of ended requests are ignored. Raises as `Engine`'s."""
        request_ids = check_ids(request_ids)
        check_reason(reason, stop_reason)
        for engine in self.engines:
            engine.finish(request_ids, reason, stop_reason)
        for request_id in request_ids:
            self.router.drop(request_id)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests with the reason "abort"; raises as `finish`."""
        self.finish(request_ids, "abort")

    def warm_up(self, **kwargs: Any) -> None:
        """Compiles the programs of `ModelRunner.warm_up` for each engine."""
        for engine in self.live:
            engine.warm_up(**kwargs)

    def update_params(self, params: Any) -> None:
        """Takes new weights on all devices; see `Lifecycle.update_params`."""
        self.worker.update_params(params)

    def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; False if a request runs, whose engine keeps its own."""
        self.router.forget()
        return all([engine.reset_prefix_cache() for engine in self.live])

    def report(self) -> str:
        """Returns a line for each engine: its devices, and its requests or why it ended."""
        lines = []
        for i, engine in enumerate(self.engines):
            where = ", ".join(str(d) for d in devices_of(engine.model_config))
            what = engine.status.ended or (
                f"{engine.scheduler.num_running} requests run, {engine.scheduler.num_waiting} wait"
            )
            lines.append(f"replica {i} on {where}: {what}\n")
        return "".join(lines)

    def save(self, folder: Path, states: Mapping[str, Any], **more: Any) -> None:
        """Writes all engines into a new folder; see `save_engines`."""
        self.status.check_awake()
        with new_folder(folder, sums=False) as part:  # each engine has its own
            left = dict(states)
            for i, engine in reversed([*enumerate(self.engines)]):
                # Completions of ended requests are saved with the first engine.
                mine = [r for r in left if r in engine.unfinished or i == 0]
                told = more | {"states": [left.pop(r) for r in mine]}
                self._gained += save_engine(engine, part / f"replica{i}", told)

    def restore(self, folder: Path, convert: Callable[..., Any]) -> list[Restored]:
        """Restores what `save` wrote; raises as `snapshot.restore_engine`."""
        self.status.check_awake()
        num, saved = len(self.engines), len(list(folder.glob("replica*")))
        if saved != num:
            raise ValueError(
                f"{folder} must hold {num} replicas, it has {saved}: restore with the "
                "data_parallel_size that it was saved with"
            )
        parts = [folder / f"replica{i}" for i in range(num)]
        for engine, part in zip(self.engines, parts, strict=True):
            check_snapshot(engine, part)  # of all, before one changes
        restored: list[Restored] = []
        try:
            for engine, part in zip(self.engines, parts, strict=True):
                restored.append(restore_engine(engine, part, convert))
        except BaseException:
            for engine in self.engines:
                engine.abort(list(engine.unfinished))
            raise
        for i, (requests, _) in enumerate(restored):
            for request in requests.values():
                self.router.follow(request, i)
        self._share_seeds(self.engines[0]._seeds)
        first, all_ = self.engines[0].worker, self.worker
        all_.weights_version, all_.cache_epoch = first.weights_version, first.cache_epoch
        for worker in (all_, *all_.workers):
            worker.lora_versions = first.lora_versions
        return restored

    def close(self) -> None:
        """Aborts all requests and frees the memory of all devices. As `Engine.close`."""
        if self.status.is_foreign:
            return
        self.status.ended = "this engine is closed: build another one"
        for engine in self.engines:
            engine.close()

    def _share_seeds(self, seeds: np.random.Generator) -> None:
        for engine in self.engines:
            engine._seeds = seeds


def make_engine(
    worker: Worker | Workers, *, make_compiler: Callable[[], Any] | None = None
) -> Engine | Replicas:
    """Returns the engine of a worker, or the engines of several as one."""
    if isinstance(worker, Workers):
        return Replicas(worker, make_compiler=make_compiler)
    return Engine.of(worker, make_compiler=make_compiler)


def save_engines(
    engine: Engine | Replicas, folder: str | Path, states: Mapping[str, Any], **more: Any
) -> None:
    """Writes an engine, or several, into a new folder.

    states: saved with their requests, by request id. more: saved with each engine.
    """
    if isinstance(engine, Replicas):
        engine.save(Path(folder).absolute(), states, **more)
    else:
        save_engine(engine, folder, more | {"states": list(states.values())})


def restore_engines(
    engine: Engine | Replicas, folder: str | Path, convert: Callable[..., Any]
) -> list[Restored]:
    """Restores what `save_engines` wrote. Returns the result of `restore_engine` for each."""
    if isinstance(engine, Replicas):
        return engine.restore(Path(folder).absolute(), convert)
    return [restore_engine(engine, folder, convert)]


def engines_of(engine: Engine | Replicas) -> list[Engine]:
    """Returns the engines that have schedulers of their own."""
    return [engine] if isinstance(engine, Engine) else engine.engines
