"""Moves an engine to another number of devices: its requests continue on a new mesh."""

from pathlib import Path
import tempfile
from typing import Any

import jax

from jaxrunner.engine.completions import Completions
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.loading.loader import Loaded
from jaxrunner.parallel.mesh import TENSOR, num_ranks
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import to_host
from jaxrunner.parallel.tensor import ShardedConfig
from jaxrunner.parallel.whole import copied, merge_one, whole_params
from jaxrunner.worker.expert_balance import in_order


def scale(completions: Completions, tensor: int | None, data: int | None) -> Engine:
    """Moves an engine whose devices have whole experts to `data` ranks of `tensor` devices each.

    They are the first of this process; None is as many as now. Requests at work go on: their keys
    and values wait in files, or are computed anew on another number of ranks; weights wait on the
    host. Programs are compiled for the new mesh.

    Raises:
      ValueError: another kind of engine, or numbers that do not divide the model or have too few
        devices; nothing changes.
      MemoryError: it does not fit on so few devices; the engine has ended.
    """
    loaded, old = _checked(completions.engine, tensor, data), completions.engine
    assert isinstance(old, Engine)
    worker, program, warm_up = old.worker, old.runner.program, old.worker.warm_up
    with completions.lock, tempfile.TemporaryDirectory() as folder:
        completions._hand_out(old.drain())
        save_engine(old, Path(folder, "engine"))
        whole = whole_params(program.model.params, program.config)
        host = to_host(in_order(old.runner))
        params = jax.tree.map(lambda x, one: merge_one(x, one.shape), host, whole)
        old.grammars.close()
        old.status.ended = "the engine has moved to other devices, and not come there"
        worker.restart(loaded, old.config)
        if warm_up is not None:
            worker.runner.prepare(**warm_up)
        spec = worker.runner.params_spec
        params = jax.tree.map(_put, copied(params, spec), spec)
        worker._set_params(params)
        if warm_up is not None:
            worker.compile_or_warm_up_model(**warm_up)
        old.status.ended = ""
        engine = Engine.of(worker, make_compiler=old.grammars.make_compiler)
        requests = restore_engine(engine, Path(folder, "engine")).requests
        for name, state in completions._states.items():
            state.request = requests.get(name, state.request)
        completions.engine = engine
    return engine


def _put(x: Any, spec: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else put(x, spec.sharding)


def _checked(engine: Any, tensor: int | None, data: int | None) -> Loaded:
    """Returns the model for so many devices; raises as `scale`."""
    config = engine.model_config
    is_cut = isinstance(config, ShardedConfig) and config.expert_parallel
    if not (isinstance(engine, Engine) and is_cut):
        raise ValueError(
            "scale_elastic_ep moves one engine with enable_expert_parallel=True over several "
            "devices, and without a drafter that has weights: build the LLM so"
        )
    N, D = tensor or config.mesh.shape[TENSOR], data or num_ranks(config.mesh)
    devices = jax.local_devices()
    asked = f"new_tensor_parallel_size={N} and new_data_parallel_size={D} are {N * D} devices"
    if engine.runner.program.is_shared:
        raise ValueError(
            f"{asked}, scale_elastic_ep moves an LLM of one process and this one is of "
            f"{jax.process_count()}: build another LLM"
        )
    if not 2 <= N * D <= len(devices):
        raise ValueError(f"{asked}, take 2 to the {len(devices)} that there are")
    engine.status.check_awake()
    return engine.worker.cut_anew(tensor_parallel_size=N, num_ranks=D, devices=devices[: N * D])
