"""An engine at work in a folder, to go on in another process with the same tokens.

The folder holds what differs from a new engine: device arrays as orbax writes them, of the KV cache
those blocks that count, and host objects as JSON. It holds neither weights nor programs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner import pytree
from jaxrunner.caches.cache_group import layer_groups
from jaxrunner.caches.interleave import WHOLE, interleave_of
from jaxrunner.engine import serialization, snapshot_check
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.interrupts import deferred
from jaxrunner.errors import in_words
from jaxrunner.loading import checksums, orbax_io
from jaxrunner.loading.new_folder import new_folder
from jaxrunner.parallel.mesh import check_one_rank
from jaxrunner.parallel.pipeline import StageConfig, refuse_spread
from jaxrunner.parallel.processes import is_first, together
from jaxrunner.parallel.stages import whole_state, with_cache, with_requests
from jaxrunner.parallel.tensor import ShardedConfig
from jaxrunner.parallel.whole import (
    copied,
    merge,
    merged_spec,
    sums_of,
    whole_params,
    whole_program,
)
from jaxrunner.program import abstract_state
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.step_handle import NewTokens
from jaxrunner.scheduling.request import Request, Status
from jaxrunner.types import Array, LayerCache
from jaxrunner.version import __version__
from jaxrunner.worker.expert_balance import in_order

MOST_NAMED = 3  # differences in one message


class Restored(NamedTuple):
    """What `restore_engine` found."""

    requests: dict[str, Request]  # unfinished ones
    more: Any  # what `save_engine` was given, or `convert` made of it


def save_engine(engine: Engine, folder: str | Path, more: Any = None) -> NewTokens:
    """Writes an engine between two steps into a new folder; the engine can go on.

    more: to be saved along, of kinds that `serialization` knows. Steps in flight are read first,
    and grammars waited for. Returns what these gave, as `Engine.step` would.

    Raises:
      ValueError: the folder is there, or not seen by all processes of a mesh, which may have no
        data ranks.
      RuntimeError: the engine sleeps, or has ended.
      FloatingPointError: as `Engine.step`; nothing is saved.
    """
    engine.status.check_awake()
    mesh = engine.runner.program.mesh
    check_one_rank(mesh, "save_state", "let its requests end")
    refuse_spread(engine.model_config, "save_state", "let its requests end")
    with new_folder(Path(folder), mesh) as part:
        gained = engine.drain()
        engine.scheduler.recall()
        state, filled = whole_state(engine.model_config, engine.runner.state), _filled(engine)
        host = {name: getattr(owner, attribute) for name, owner, attribute in _fields(engine)}
        orbax_io.write(part / "tables", (state.requests, state.tables), mesh)
        for i, blocks in enumerate(filled):
            # One at a time: a copy of the whole cache may fit neither device nor host.
            values = _read(state.kv[i], np.array(blocks))
            whole = _whole_blocks(engine.runner, i, len(blocks))
            orbax_io.write(part / f"layer{i}", merge(values, whole), mesh)
        told = dict(context=_context(engine), filled=filled, host=host, more=more)
        if is_first(mesh):
            (part / "host.json").write_text(serialization.dumps(told), encoding="utf-8")
    return gained


def restore_engine(
    engine: Engine,
    folder: str | Path,
    convert: Callable[[Any, Sequence[Request]], Any] | None = None,
) -> Restored:
    """Makes an engine without requests the one that was saved. Cached prefixes come along.

    convert: makes of what was saved along, and of all unfinished requests, what is returned.

    Raises:
      FileNotFoundError: there is no such folder.
      RuntimeError: requests are at work, or the engine sleeps or has ended.
      ValueError: a file has changed since it was saved, or model, sizes or weights differ from
        those of the saved one, which it names, or there is no tokenizer for a grammar. The engine
        goes on as before; at worst it has forgotten cached prefixes.
    """
    folder, mesh = Path(folder).absolute(), engine.runner.program.mesh
    check_one_rank(mesh, "restore_state", "add its requests anew")
    refuse_spread(engine.model_config, "restore_state", "add its requests anew")
    told, live, spec = check_snapshot(engine, folder)
    tables = orbax_io.read(folder / "tables", spec, mesh)
    try:
        engine.grammars.resume(live)
        more = told["more"] if convert is None else _converted(convert, told["more"], live)
    except ValueError:
        engine.grammars.drop([request.request_id for request in live], "abort")
        raise
    engine.drain()
    while engine.step():
        pass  # of requests that have ended
    engine.reset_prefix_cache()  # its blocks are written to
    try:
        for i, blocks in enumerate(told["filled"]):
            _fill(engine.runner, i, np.array(blocks), folder / f"layer{i}")
    except BaseException:
        if not pytree.is_alive(engine.runner.state):
            engine.runner.restart()  # nobody needs what a lost cache held
        raise
    _commit(engine, told["host"], tables)
    return Restored({request.request_id: request for request in live}, more)


def check_snapshot(engine: Engine, folder: Path) -> tuple[dict[str, Any], list[Request], Any]:
    """Checks all that `restore_engine` reads but the contents of arrays; raises as it.

    Returns the objects of the host, the unfinished requests, and what the tables must be like.
    """
    engine.status.check_awake()
    if engine.has_unfinished:
        raise RuntimeError("requests are at work: finish or abort them, then restore")
    together(engine.runner.program.mesh, partial(_check_files, folder))
    told, requests = _told(engine, folder)
    live = [request for request in requests if request.status is not Status.FINISHED]
    return told, live, _spec(engine, folder, told["filled"])


def _check_files(folder: Path) -> None:
    if not (folder / "host.json").is_file():
        raise FileNotFoundError(f"{folder} must be a folder that an engine was saved in")
    checksums.check(folder, required=True)


def _told(engine: Engine, folder: Path) -> tuple[dict[str, Any], list[Request]]:
    """Returns the objects of the host, all checked."""
    path = folder / "host.json"
    try:
        told, requests = serialization.loads(path.read_text(encoding="utf-8"))
        told = {name: told[name] for name in ("context", "filled", "host", "more")}
        context = {str(name): str(value) for name, value in told["context"].items()}
    except Exception as error:  # whatever a text can make of itself
        raise ValueError(f"{path} is none that an engine wrote: {in_words(error)}") from error
    _check_context(folder, context, _context(engine))
    own = {name: getattr(owner, attribute) for name, owner, attribute in _fields(engine)}
    snapshot_check.check(engine, own, told, requests)
    return told, requests


def _spec(engine: Engine, folder: Path, filled: list[list[int]]) -> Any:
    """Returns what the tables must be like, once all files are known to be so."""
    state = whole_state(engine.model_config, engine.runner.state)
    for i, blocks in enumerate(filled):
        whole = _whole_blocks(engine.runner, i, len(blocks))
        orbax_io.check_like(folder / f"layer{i}", whole, engine.runner.program.mesh)
    return orbax_io.abstract((state.requests, state.tables))


def _converted(convert: Callable, more: Any, live: Sequence[Request]) -> Any:
    try:
        return convert(more, live)
    except Exception as error:
        raise ValueError(
            f"what was saved along with the engine cannot be taken up: {in_words(error)}"
        ) from error


def _read(layer: LayerCache, blocks: np.ndarray) -> Any:
    """Returns what a layer's blocks hold, on its devices."""
    where = jax.tree.map(lambda x: x.sharding, layer)
    return jax.jit(_take, out_shardings=where)(layer, blocks)


def _take(layer: LayerCache, blocks: Array) -> LayerCache:
    return jax.tree.map(lambda cache: cache[blocks], layer)


@deferred
def _fill(runner: ModelRunner, i: int, blocks: np.ndarray, folder: Path) -> None:
    """Writes what a layer's blocks held into its cache."""
    config, whole = runner.program.config, _whole_blocks(runner, i, len(blocks))
    layer = whole_state(config, runner.state).kv[i]
    spec = _blocks_of(layer, len(blocks))
    saved = orbax_io.read(folder, merged_spec(spec, whole), runner.program.mesh)
    values = copied(saved, spec)
    runner.state = with_cache(config, runner.state, i, _put(layer, blocks, values))


def _blocks_of(layer: LayerCache, count: int) -> Any:
    """Returns what so many blocks of a cache are like."""

    def one(cache: Array) -> jax.ShapeDtypeStruct:
        shape = (count, *cache.shape[1:])
        return jax.ShapeDtypeStruct(shape, cache.dtype, sharding=cache.sharding)

    return jax.tree.map(one, layer)


def _whole_blocks(runner: ModelRunner, i: int, count: int) -> Any:
    """Returns what so many blocks of a layer are like as they are saved: on one device, but where
    devices have other tokens each."""
    config = runner.program.config
    if interleave_of(config) != WHOLE:
        return _blocks_of(whole_state(config, runner.state).kv[i], count)
    return _blocks_of(abstract_state(whole_program(runner.program)).kv[i], count)


@partial(jax.jit, donate_argnums=0)
def _put(layer: LayerCache, blocks: Array, values: LayerCache) -> LayerCache:
    return jax.tree.map(lambda x, new: x.at[blocks].set(new), layer, values)


@deferred
def _commit(engine: Engine, host: dict[str, Any], tables: tuple[Any, Any]) -> None:
    """Gives an engine's objects what those of the saved one had."""
    for name, owner, attribute in list(_fields(engine)):
        setattr(owner, attribute, host[name])
    engine.runner.state = with_requests(engine.runner.state, *tables)


def owners_of(engine: Engine) -> dict[str, Any]:
    """Returns what changes from step to step, by name; `SAVED` of each names its attributes."""
    scheduler, adapters = engine.scheduler, engine.runner.adapters
    own = {f"pool{pool.group}": pool for pool in engine.pools}
    own |= dict(adapters=adapters, turns=scheduler.admission.adapters) if adapters else {}
    return own | dict(
        engine=engine, scheduler=scheduler, waiting=scheduler.waiting, chunks=scheduler.chunks,
        admission=scheduler.admission, tables=scheduler.tables, worker=engine.worker,
        slots=engine.runner.requests,
    )  # fmt: skip


def _fields(engine: Engine) -> Iterator[tuple[str, Any, str]]:
    """Yields what a snapshot keeps: a name, whose it is, and as which attribute."""
    for name, owner in owners_of(engine).items():
        for attribute in owner.SAVED:
            yield f"{name}.{attribute}", owner, attribute


def _filled(engine: Engine) -> list[list[int]]:
    """Returns each layer's blocks whose contents count; one at least, as orbax wants."""
    config, of_group = engine.model_config, [pool.filled() or [0] for pool in engine.pools]
    return [of_group[g] for g in layer_groups(config.cache_kinds)]


def _context(engine: Engine) -> dict[str, str]:
    """Says what an engine must have in common with the one that goes on in its place."""
    program = whole_program(engine.runner.program)  # any mesh can go on
    config = engine.model_config
    model = config.family if isinstance(config, ShardedConfig | StageConfig) else program.model
    functions = dict(layers=model.layers, logits=model.logits)
    tables = [(table.name, table.extra_args) for table in program.tables]
    told = dict(jaxrunner=__version__, tables=repr(tables))
    told |= {name: f"{f.__module__}.{f.__qualname__}" for name, f in functions.items()}
    told |= engine.runner.adapters.describe() if engine.runner.adapters else {}
    configs: tuple[Any, Any] = program.config, program.engine
    for config in configs:  # functions, which no other process has at one place, are no `repr`
        told |= {f.name: repr(getattr(config, f.name)) for f in fields(config) if f.repr}
    pools = [(pool.layers, pool.block_size) for pool in engine.runner.program.cache_groups]
    told |= dict(cache_groups=repr(pools))
    if (interleave := interleave_of(engine.model_config)) != WHOLE:
        told |= dict(interleave=f"{interleave} on {engine.runner.program.mesh}")
    params = in_order(engine.runner)
    whole = dict(jax.tree.leaves_with_path(whole_params(program.model.params, program.config)))
    of_devices = dict[frozenset[Any], list[Any]]()  # each stage of a pipeline has some weights
    for leaf in jax.tree.leaves_with_path(params):
        of_devices.setdefault(frozenset(leaf[1].devices()), []).append(leaf)
    for leaves in of_devices.values():
        shapes = tuple(whole[path].shape for path, _ in leaves)
        sums = jax.device_get(sums_of([x for _, x in leaves], shapes))
        for (path, x), shape, total in zip(leaves, shapes, sums, strict=True):
            name = f"params{jax.tree_util.keystr(path)}"
            told[name] = f"{x.dtype}{list(shape)} of sum {total:#x}"
    return told


def _check_context(folder: Path, saved: dict[str, str], own: dict[str, str]) -> None:
    if names := sorted(name for name in saved | own if saved.get(name) != own.get(name)):
        pairs = [f"{n}={saved.get(n)}, not {own.get(n)}" for n in names[:MOST_NAMED]]
        raise ValueError(
            f"the engine saved in {folder} differs from this one in {len(names)} things, it had "
            f"{'; '.join(pairs)}: build this one like it"
        )
