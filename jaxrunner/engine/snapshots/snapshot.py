"""An engine at work in a folder, to go on in another process with the same tokens.

The folder holds what differs from a new engine: device arrays as orbax writes them, of the KV cache
those blocks that count, and host objects as JSON. It holds neither weights nor programs.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxrunner import pytree
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.interrupts import deferred
from jaxrunner.engine.snapshots import serialization, snapshot_check
from jaxrunner.errors import in_words
from jaxrunner.loading import checksums, orbax_io
from jaxrunner.loading.new_folder import new_folder
from jaxrunner.parallel.pipeline import refuse_spread
from jaxrunner.parallel.processes import is_first, together
from jaxrunner.parallel.stages import whole_state, with_requests
from jaxrunner.ranks.cache_blocks import (
    Blocks,
    filled_blocks,
    read_blocks,
    saved_spec,
    write_blocks,
)
from jaxrunner.ranks.requests import RankedRequests
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.runner.request_table import RequestTable
from jaxrunner.runner.step_handle import NewTokens
from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.ranks import RankedScheduler, take_up
from jaxrunner.scheduling.request import Request, Status
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.stateful import Stateful
from jaxrunner.worker.likeness import check_alike, likeness


class Restored(NamedTuple):
    """The contents of a snapshot, as `restore_engine` returns them."""

    requests: dict[str, Request]  # unfinished ones
    more: Any  # the object that `save_engine` was given, or `convert` made of it


def save_engine(engine: Engine, folder: str | Path, more: Any = None) -> NewTokens:
    """Writes an engine between two steps into a new folder; the engine can go on.

    more: to be saved along, of kinds that `serialization` knows. Steps in flight are read first,
    and grammars waited for. Returns what these gave, as `Engine.step` would.

    Raises:
      ValueError: the folder is there, or not seen by all processes of a mesh.
      RuntimeError: the engine sleeps, or has ended.
      FloatingPointError: as `Engine.step`; nothing is saved.
    """
    engine.status.check_awake()
    program, mesh = engine.runner.program, engine.runner.program.mesh
    refuse_spread(program.config, "save_state", "let its requests end")
    with new_folder(Path(folder), mesh) as part:
        gained = engine.drain()
        engine.scheduler.recall()
        state = whole_state(program.config, engine.runner.state)
        filled = filled_blocks(engine.pools, program.config.cache_kinds)
        orbax_io.write(part / "tables", (state.requests, state.tables), mesh)
        for i, blocks in enumerate(filled):
            # One at a time: a copy of the whole cache may fit neither device nor host.
            write_blocks(program, i, state.kv[i], blocks, part / f"layer{i}")
        told = dict(context=likeness(engine.runner), filled=filled, host=_values(engine), more=more)
        if is_first(mesh):
            (part / "host.json").write_text(serialization.dumps(told), encoding="utf-8")
    return gained


def restore_engine(
    engine: Engine,
    folder: str | Path,
    convert: Callable[[Any, Sequence[Request]], Any] | None = None,
) -> Restored:
    """Makes an engine without requests the one that was saved.

    On as many data ranks cached prefixes come along. On another number of ranks requests start
    again from their tokens.

    convert: makes of what was saved along, and of all unfinished requests, what is returned.

    Raises:
      FileNotFoundError: there is no such folder.
      RuntimeError: requests are at work, or the engine sleeps or has ended.
      ValueError: a file has changed since it was saved, or model, sizes or weights differ from
        those of the saved one, which it names, or there is no tokenizer for a grammar. The engine
        goes on as before; at worst it has forgotten cached prefixes.
    """
    folder, mesh = Path(folder).absolute(), engine.runner.program.mesh
    refuse_spread(engine.model_config, "restore_state", "add its requests anew")
    told, live, spec = check_snapshot(engine, folder)
    tables = None if spec is None else orbax_io.read(folder / "tables", spec, mesh)
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
    if tables is None:
        _take_up(engine, told["host"], live)
    else:
        _fill_all(engine.runner, told["filled"], folder)
        _commit(engine, told["host"], tables)
    return Restored({request.request_id: request for request in live}, more)


def check_snapshot(engine: Engine, folder: Path) -> tuple[dict[str, Any], list[Request], Any]:
    """Checks all that `restore_engine` reads but the contents of arrays; raises as it.

    Returns the objects of the host, the unfinished requests, and what the tables must be like: None
    where they are of another number of data ranks.
    """
    engine.status.check_awake()
    if engine.has_unfinished:
        raise RuntimeError("requests are at work: finish or abort them, then restore")
    together(engine.runner.program.mesh, partial(_check_files, folder))
    told, requests = _told(engine, folder)
    live = [request for request in requests if request.status is not Status.FINISHED]
    is_alike = len(told["host"]) == len(owners_of(engine))
    return told, live, _spec(engine, folder, told["filled"]) if is_alike else None


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
        _, other_dealing, *other_ranks = told["host"]
    except Exception as error:  # whatever a text can make of itself
        raise ValueError(f"{path} is none that an engine wrote: {in_words(error)}") from error
    check_alike(folder, context, likeness(engine.runner))
    shared, dealing, *ranks = _values(engine)
    if len(other_ranks) != len(ranks):
        dealing = other_dealing  # which is not taken over
    own = [shared, dealing, *ranks[:1] * len(other_ranks)]
    snapshot_check.check(engine, own, told, requests)
    return told, requests


def _spec(engine: Engine, folder: Path, filled: list[Blocks]) -> Any:
    """Returns what the tables must be like, once all files are known to be so."""
    program, state = engine.runner.program, whole_state(engine.model_config, engine.runner.state)
    for i, blocks in enumerate(filled):
        whole = saved_spec(program, i, state.kv[i], blocks)
        orbax_io.check_like(folder / f"layer{i}", whole, program.mesh)
    return orbax_io.abstract((state.requests, state.tables))


def _converted(convert: Callable, more: Any, live: Sequence[Request]) -> Any:
    try:
        return convert(more, live)
    except Exception as error:
        raise ValueError(
            f"what was saved along with the engine cannot be taken up: {in_words(error)}"
        ) from error


def _fill_all(runner: ModelRunner, filled: list[Blocks], folder: Path) -> None:
    """Writes what blocks held into all caches."""
    try:
        for i, blocks in enumerate(filled):
            _fill(runner, i, blocks, folder / f"layer{i}")
    except BaseException:
        if not pytree.is_alive(runner.state):
            runner.restart()  # nobody needs what a lost cache held
        raise


@deferred
def _fill(runner: ModelRunner, i: int, blocks: Blocks, folder: Path) -> None:
    """Writes what a layer's blocks held into its cache."""
    runner.state = read_blocks(runner.program, runner.state, i, blocks, folder)


@deferred
def _commit(engine: Engine, host: list[dict[str, Any]], tables: tuple[Any, Any]) -> None:
    """Gives an engine's objects what those of the saved one had."""
    for owners, saved in zip(owners_of(engine), host, strict=True):
        _load(owners, saved)
    engine.runner.state = with_requests(engine.runner.state, *tables)


@deferred
def _take_up(engine: Engine, host: list[dict[str, Any]], live: Sequence[Request]) -> None:
    """Gives an engine the requests of one with another number of data ranks."""
    shared, _, *ranks = host
    _load(dict(engine=engine, worker=engine.worker), shared)
    started = {name for of in ranks for name in of["admission._preempted"]}
    started |= {request.request_id for of in ranks for request in of["scheduler.running"]}
    take_up(engine.scheduler, live, started)


def owners_of(engine: Engine) -> list[dict[str, Any]]:
    """Returns the `Stateful` objects that change from step to step, by name.

    First what there is one of, then what deals requests out to data ranks, and what each has.
    """
    scheduler, slots, adapters = engine.scheduler, engine.runner.requests, engine.runner.adapters
    shared: dict[str, Any] = dict(engine=engine, worker=engine.worker)
    ranks, tables, dealing = [scheduler], [slots], dict[str, Any]()
    if isinstance(scheduler, RankedScheduler) and isinstance(slots, RankedRequests):
        ranks, tables = scheduler.ranks, slots.tables
        dealing = dict(ranks=scheduler, router=scheduler.router, slots_of_ranks=slots)
    if adapters:
        shared |= dict(adapters=adapters, turns=ranks[0].admission.adapters)
    G = len(engine.runner.program.cache_groups)
    of_ranks = [engine.pools[i * G : (i + 1) * G] for i in range(len(ranks))]
    return [shared, dealing, *map(_owners_of_rank, ranks, tables, of_ranks)]


def _owners_of_rank(
    scheduler: Scheduler, slots: RequestTable, pools: list[BlockPool]
) -> dict[str, Any]:
    """Returns what changes of a rank from step to step."""
    own: dict[str, Any] = {f"pool{pool.group}": pool for pool in pools}
    return own | dict(
        scheduler=scheduler, waiting=scheduler.waiting, admission=scheduler.admission,
        tables=scheduler.tables, slots=slots,
    )  # fmt: skip


def _load(owners: dict[str, Stateful], saved: dict[str, Any]) -> None:
    """Gives objects what `_values` returned of others."""
    for name, owner in owners.items():
        owner.load_state_dict({x: saved[f"{name}.{x}"] for x in owner.SAVED})


def _values(engine: Engine) -> list[dict[str, Any]]:
    """Returns what a snapshot keeps, by name; in the parts of `owners_of`."""
    return [
        {f"{name}.{x}": value for name, owner in owners.items()
         for x, value in owner.state_dict().items()}
        for owners in owners_of(engine)
    ]  # fmt: skip
