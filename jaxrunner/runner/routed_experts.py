"""Routes of requests between devices and their host: read where a request ends, or given before.

Launches run in their order, so what is read is what the steps launched before have written.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
import functools
import itertools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.indexing import take
from jaxrunner.mixtures.recorded_routes import GIVEN, RoutesCache, routes_group
from jaxrunner.parallel.mesh import placed
from jaxrunner.parallel.processes import check_own
from jaxrunner.parallel.stages import parts_of, with_part
from jaxrunner.program.program import Program
from jaxrunner.program.state import of_all_ranks
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.types import Array, State

Parts = list[list[jax.Array]]  # runs of blocks, of each stage [blocks, S, its layers, k]
CHUNK = 1024  # tokens of a launch, about
WHOLE = ("stop", "length", "repetition")  # finish reasons of requests that return routes


class ToldRoutes:
    """Routes on their way from the devices."""

    def __init__(self, parts: Parts, count: int) -> None:
        """count: of the tokens in `parts` that are meant."""
        self._parts, self._count = parts, count
        self._whole: np.ndarray | None = None
        for part in itertools.chain(*parts):
            part.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        """Whether `get` does not wait."""
        return all(cast(Any, part).is_ready() for part in itertools.chain(*self._parts))

    def get(self) -> np.ndarray:
        """Waits for the routes, and returns them, int16 [tokens, layers, k]."""
        if self._whole is None:
            runs = [np.concatenate([*map(np.asarray, run)], 2) for run in self._parts]
            whole = np.concatenate([run.reshape(-1, *run.shape[2:]) for run in runs])
            self._whole, self._parts = whole[: self._count], []
        return self._whole


class RoutesReader:
    """Reads the routes of requests from the device, and writes given routes to it."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, program = runner, runner.program
        group = routes_group(program.config)
        self.is_on = group is not None
        self._on_their_way: deque[ToldRoutes] = deque()
        self._preempted: dict[str, Parts] = {}  # of steps that may yet end a request
        if group is None:
            return
        check_own(program.mesh, "enable_return_routed_experts=True", "leave it out")
        self._group = group
        self._size = program.cache_groups[group].block_size
        self._num_blocks = program.cache_groups[group].num_blocks  # of a data rank
        self._blocks = -(-min(CHUNK, program.engine.max_model_len) // self._size)
        self._most = self._blocks * self._size  # tokens of a launch
        self._stages = [
            _compiled(stage, group, self._blocks, self._most)
            for stage in program.stages or (program,)
        ]

    def end(self, requests: Iterable[Request]) -> None:
        """Reads the routes of requests that have ended well, before another step is launched."""
        for request in requests if self.is_on else ():
            parts = self._preempted.pop(request.request_id, None)
            count = request.num_tokens - 1  # nothing is computed of the last one
            if request.finish_reason in WHOLE and request.routed_experts is None and count > 0:
                request.routed_experts = ToldRoutes(parts or self._launch(request), count)
                self._on_their_way.append(request.routed_experts)

    def preempt(self, scheduled: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Reads routes of requests that lose their blocks, and which a step in flight may end."""
        if self.is_on:
            for new in scheduled.scheduled_new_reqs:
                self._preempted.pop(new.request_id, None)
            for request in (requests[r] for r in scheduled.preempted_req_ids):
                if request.num_in_flight:
                    self._preempted[request.request_id] = self._launch(request)

    def give(self, scheduled: SchedulerOutput) -> None:
        """Writes given routes of the tokens of a step into their blocks, before it is launched."""
        if not self.is_on or scheduled.num_steps > 1:
            return
        for rank, part in enumerate(scheduled.parts or [scheduled]):
            for request in part.requests.values():
                if request.given_routes is not None:
                    num_tokens = part.num_scheduled_tokens[request.request_id]
                    scheduled.replays_routes |= self._give(request, num_tokens, rank)

    def _give(self, request: Request, num_tokens: int, rank: int) -> bool:
        """Writes given routes of the last tokens that are planned of a request; whether any are."""
        assert request.given_routes is not None
        start = request.num_computed - num_tokens
        routes = request.given_routes[start : request.num_computed]
        table = np.array(request.blocks[self._group], np.int64) + rank * self._num_blocks
        for first in range(0, len(routes), self._most):
            self._put(table, start + first, GIVEN - routes[first : first + self._most])
        return len(routes) > 0

    def forget(self) -> None:
        """Takes given routes off the device that a step which failed has not replayed."""
        for i in range(len(self._stages) if self.is_on else 0):
            self._with_caches(i, lambda caches: jax.tree.map(jnp.zeros_like, caches))

    def collect(self, *, wait: bool = False) -> None:
        """Takes what has come off the device, or with `wait` all."""
        while self._on_their_way and (wait or self._on_their_way[0].is_ready):
            self._on_their_way.popleft().get()

    def _launch(self, request: Request) -> Parts:
        slot, step = self._runner.requests[request.request_id], self._blocks
        before = slot // self._runner.program.dims["R"] * self._num_blocks
        parts = [
            (stage.read, stage.caches(part), part.requests.blocks[self._group])
            for stage, part in zip(self._stages, parts_of(self._runner.state), strict=True)
        ]
        firsts = range(0, -(-(request.num_known - 1) // self._size) or 1, step)
        places = [np.array([slot, first, before], np.int32) for first in firsts]
        return [[read(caches, table, at) for read, caches, table in parts] for at in places]

    def _put(self, table: np.ndarray, start: int, kept: np.ndarray) -> None:
        """Writes the routes of tokens from position `start` on, as they are kept."""
        count, most = len(kept), self._most
        positions = np.arange(start, start + count)
        index = np.full(most, np.iinfo(np.int32).max, np.int32)
        index[:count] = table[positions // self._size] * self._size + positions % self._size
        routes = np.zeros((most, *kept.shape[1:]), np.int16)
        routes[:count] = kept
        first = 0
        for i, stage in enumerate(self._stages):
            of_stage = routes[:, first : first + len(stage.places)]
            self._with_caches(i, functools.partial(stage.write, index=index, experts=of_stage))
            first += len(stage.places)

    def _with_caches(self, i: int, change: Callable[[Any], Any]) -> None:
        """Changes the caches of routes of stage i."""
        state, places = self._runner.state, self._stages[i].places
        part = parts_of(state)[i]
        made = dict(zip(places, change(self._stages[i].caches(part)), strict=True))
        kv = tuple(made.get(j, cache) for j, cache in enumerate(part.kv))
        self._runner.state = with_part(state, i, replace(part, kv=kv))


class _Stage(NamedTuple):
    """The caches of routes that a stage has, and what reads and writes them."""

    places: list[int]
    read: Any
    write: Any

    def caches(self, part: State) -> list[Any]:
        """Returns those of a stage's state."""
        return [part.kv[place] for place in self.places]


def _compiled(program: Program, group: int, num_blocks: int, num_tokens: int) -> _Stage:
    """Returns what reads so many blocks of a request, and what writes so many tokens."""
    state = of_all_ranks(program)
    stage = _Stage([i for i, g in enumerate(program.layer_groups) if g == group], None, None)
    caches, table = stage.caches(state), state.requests.blocks[group]
    layers, k = len(caches), caches[0].experts.shape[-1]
    tokens = jax.ShapeDtypeStruct((num_tokens, layers, k), jnp.int16)
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (3, num_tokens)]
    if program.mesh is not None:
        tokens, *ints = placed([tokens, *ints], program.mesh)
    read = jax.jit(_read, static_argnames="num_blocks")
    where = jax.tree.map(lambda x: x.sharding, caches)
    write = jax.jit(_write, donate_argnames="caches", out_shardings=where)
    return stage._replace(
        read=read.lower(caches, table, ints[0], num_blocks=num_blocks).compile(),
        write=write.lower(caches, index=ints[1], experts=tokens).compile(),
    )


def _read(caches: list[RoutesCache], table: Array, at: Array, *, num_blocks: int) -> Array:
    """Returns the routes in blocks of a request: at is its slot, the first one's place, and the
    blocks of data ranks before its own."""
    blocks = at[2] + take(table, (at[0], at[1] + jnp.arange(num_blocks)))
    return jnp.stack([take(cache.experts, blocks) for cache in caches], 2)


def _write(caches: list[RoutesCache], *, index: Array, experts: Array) -> list[RoutesCache]:
    """Writes routes, [tokens, layers, k], to block * S + offset of each."""
    at = jnp.divmod(index, caches[0].experts.shape[1])
    return [
        RoutesCache(cache.experts.at[at].set(experts[:, y], mode="drop"))
        for y, cache in enumerate(caches)
    ]
