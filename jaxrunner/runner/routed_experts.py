"""Routes of requests between a device and its host: read where a request ends, or given before.

Launches run in their order, so what is read is what the steps launched before have written.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.indexing import take
from jaxrunner.mixtures.recorded_routes import GIVEN, RoutesCache, routes_place
from jaxrunner.parallel.mesh import placed
from jaxrunner.parallel.processes import check_own
from jaxrunner.program import Program, abstract_state
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.scheduling.request import Request, SchedulerOutput
from jaxrunner.types import Array

CHUNK = 1024  # tokens of a launch, about
WHOLE = ("stop", "length", "repetition")  # ends of requests that are told their routes


class ToldRoutes:
    """Routes on their way from a device."""

    def __init__(self, parts: list[jax.Array], count: int) -> None:
        """parts: [blocks, S, layers, k] each; count: of the tokens in them that are meant."""
        self._parts, self._count = parts, count
        self._whole: np.ndarray | None = None
        for part in parts:
            part.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        """Whether `get` does not wait."""
        return all(cast(Any, part).is_ready() for part in self._parts)

    def get(self) -> np.ndarray:
        """Waits for the routes, and returns them, int16 [tokens, layers, k]."""
        if self._whole is None:
            parts = [np.asarray(part).reshape(-1, *part.shape[2:]) for part in self._parts]
            self._whole, self._parts = np.concatenate(parts)[: self._count], []
        return self._whole


class RoutesReader:
    """What tells requests their routes, and the device those that they bring along."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, program = runner, runner.program
        place = routes_place(program.config)
        self.is_on = place is not None
        self._on_their_way: deque[ToldRoutes] = deque()
        self._preempted: dict[str, list[jax.Array]] = {}  # of steps that may yet end a request
        if place is None:
            return
        check_own(program.mesh, "enable_return_routed_experts=True", "leave it out")
        self._layer, self._group = place
        self._size = program.cache_groups[self._group].block_size
        self._blocks = -(-min(CHUNK, program.engine.max_model_len) // self._size)
        self._most = self._blocks * self._size  # tokens of a launch
        self._read, self._write = _compiled(program, *place, self._blocks, self._most)

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
        for request in scheduled.requests.values() if self.is_on else ():
            if request.given_routes is None or scheduled.num_steps > 1:
                continue
            end = request.num_computed
            start = end - scheduled.num_scheduled_tokens[request.request_id]
            routes = request.given_routes[start:end]
            scheduled.replays_routes |= len(routes) > 0
            table = np.array(request.blocks[self._group], np.int64)
            for first in range(0, len(routes), self._most):
                part = routes[first : first + self._most]
                self._put(table, start + first, GIVEN - part)

    def forget(self) -> None:
        """Takes given routes off the device that a step which failed has not replayed."""
        if self.is_on:
            state = self._runner.state
            kv = list(state.kv)
            kv[self._layer] = jax.tree.map(jnp.zeros_like, kv[self._layer])
            self._runner.state = replace(state, kv=tuple(kv))

    def collect(self, *, wait: bool = False) -> None:
        """Takes what has come off the device, or with `wait` all."""
        while self._on_their_way and (wait or self._on_their_way[0].is_ready):
            self._on_their_way.popleft().get()

    def _launch(self, request: Request) -> list[jax.Array]:
        state, slot = self._runner.state, self._runner.requests[request.request_id]
        table, cache, step = state.requests.blocks[self._group], state.kv[self._layer], self._blocks
        firsts = range(0, -(-(request.num_known - 1) // self._size) or 1, step)
        return [self._read(cache, table, np.array([slot, first], np.int32)) for first in firsts]

    def _put(self, table: np.ndarray, start: int, kept: np.ndarray) -> None:
        """Writes the routes of tokens from position `start` on, as they are kept."""
        count, most = len(kept), self._most
        positions = np.arange(start, start + count)
        index = np.full(most, np.iinfo(np.int32).max, np.int32)
        index[:count] = table[positions // self._size] * self._size + positions % self._size
        routes = np.zeros((most, *kept.shape[1:]), np.int16)
        routes[:count] = kept
        state = self._runner.state
        kv = list(state.kv)
        kv[self._layer] = self._write(kv[self._layer], index, routes)
        self._runner.state = replace(state, kv=tuple(kv))


def _compiled(program: Program, layer: int, group: int, num_blocks: int, num_tokens: int) -> Any:
    """Returns what reads so many blocks of a request, and what writes so many tokens."""
    state = abstract_state(program)
    cache, table = cast(Any, state.kv[layer]), state.requests.blocks[group]
    tokens = jax.ShapeDtypeStruct((num_tokens, *cache.experts.shape[2:]), jnp.int16)
    ints = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (2, num_tokens)]
    if program.mesh is not None:
        tokens, *ints = placed([tokens, *ints], program.mesh)
    read = jax.jit(_read, static_argnames="num_blocks")
    write = jax.jit(_write, donate_argnames="cache")
    return (
        read.lower(cache, table, ints[0], num_blocks=num_blocks).compile(),
        write.lower(cache, ints[1], tokens).compile(),
    )


def _read(cache: RoutesCache, table: Array, at: Array, *, num_blocks: int) -> Array:
    """Returns the routes in blocks of a request: at is its slot, and the first one's place."""
    places = at[1] + jnp.arange(num_blocks)
    return take(cache.experts, take(table, (at[0], places)))


def _write(cache: RoutesCache, index: Array, experts: Array) -> RoutesCache:
    """Writes routes, [tokens, layers, k], to block * S + offset of each."""
    N, S, *rest = cache.experts.shape
    kept = cache.experts.reshape(N * S, *rest).at[index].set(experts, mode="drop")
    return RoutesCache(kept.reshape(N, S, *rest))
