"""The adapters of a runner: which of those on the host lie on the device, and where.

Places are few, and given anew to the adapter that a request needs: of those that no running request
has, the one that was needed least recently gives way. Arrays are written in place, between steps.
"""

from collections.abc import Collection, Iterable
import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.device.program_spec import flat_params
from jaxrunner.lora.adapter import Adapter
from jaxrunner.lora.saved_modules import put
from jaxrunner.lora.stacks import SAVED, abstract_stacks, make_stacks, merged
from jaxrunner.program.program import Program
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.scheduling.stateful import Stateful


class DeviceAdapters(Stateful):
    """Adapters by id, and the stacks that hold `max_loras` of them."""

    SAVED = ("placed",)  # in a snapshot

    def __init__(self, program: Program):
        self._program = program
        self.known: dict[int, Adapter] = {}  # on the host, the one asked for least recently first
        self.pinned: set[int] = set()  # those that never give way
        # The adapter in each place, 0 for none; the place that was needed least recently first.
        self.places: list[int] = [0] * program.engine.max_loras
        self._order = list(range(program.engine.max_loras))
        # Stages of a pipeline have stacks each, on their devices.
        self._stages = program.stages or (program,)
        self._stacks: Any = tuple(map(make_stacks, self._stages))
        self._merged: tuple[Any, Any, Any] = (None, None, None)  # the last two, and both together
        self._put = [_putter(stage) for stage in self._stages]

    def warm_up(self) -> None:
        """Compiles what writes an adapter, by writing none into a place that has none."""
        if 0 in self.places:
            self._write(self.places.index(0), None)

    @property
    def placed(self) -> list[list[int]]:
        """The adapter in each place, and the places, the one needed least recently first."""
        return [list(self.places), list(self._order)]

    @placed.setter
    def placed(self, placed: list[list[int]]) -> None:
        self.places, self._order = map(list, placed)
        for place, lora_id in enumerate(self.places):
            self._write(place, self.known[lora_id] if lora_id else None)

    def check_placed(self, placed: list[list[int]]) -> bool:
        """Whether `placed` may be set: each place once, each adapter known and there once."""
        places, order = placed
        here = [lora_id for lora_id in places if lora_id]
        alike = len(places) == len(self.places) and sorted(order) == sorted(self._order)
        return alike and len({*here}) == len(here) and {*here} <= self.known.keys()

    def describe(self) -> dict[str, str]:
        """Says of each adapter what two that are alike have in common."""
        return {f"adapter {i}": f"{of.name} {of.digest}" for i, of in self.known.items()}

    def copy(self) -> "DeviceAdapters":
        """Returns adapters that go their own way, for a runner that does; the host's are shared."""
        other = copy.copy(self)
        other.known, other.pinned = dict(self.known), set(self.pinned)
        other.places, other._order = list(self.places), list(self._order)
        other._stacks = jax.tree.map(jnp.copy, self._stacks)
        return other

    def sleep(self) -> None:
        """Gives the device memory back; `wake_up` brings the adapters there again."""
        pytree.delete(self._stacks)
        self._stacks, self._merged = None, (None, None, None)

    def wake_up(self) -> None:
        """Brings the adapters back that a `sleep` took away; else nothing."""
        if self._stacks is None:
            self._stacks = tuple(map(make_stacks, self._stages))
            for place, lora_id in enumerate(self.places):
                if lora_id:
                    self._write(place, self.known[lora_id])

    def merged(self, params: Any) -> Any:
        """Returns weights with the adapters beside them, flat, as programs with adapters take them.

        params: in a pipeline those of each stage.
        """
        if self._merged[0] is not params or self._merged[1] is not self._stacks:
            parts = params if self._program.stages else (params,)
            both = tuple(flat_params(merged(*of)) for of in zip(parts, self._stacks, strict=True))
            self._merged = params, self._stacks, both if self._program.stages else both[0]
        return self._merged[2]

    def admit(self, new: Iterable[NewRequest], in_use: Collection[int]) -> None:
        """Gives new requests the place of their adapter, bringing it to the device if need be.

        in_use: adapters of requests that run.

        Raises:
          ValueError: there is no such adapter.
          RuntimeError: all places are in use.
        """
        new = list(new)
        held = {*in_use, *(request.lora_id for request in new)} - {0}
        self.check(held)
        for request in new:
            has_one = request.lora_id > 0
            request.lora_place = 1 + self._place_of(request.lora_id, held) if has_one else 0

    def check(self, lora_ids: Collection[int]) -> None:
        """Checks that adapters may be on the device together, with the pinned ones.

        Raises:
          ValueError: there is no such adapter.
          RuntimeError: these are more than there are places.
        """
        if unknown := sorted({*lora_ids} - self.known.keys()):
            raise ValueError(f"lora_id={unknown[0]} is no adapter that add_lora was given: add it")
        if len({*lora_ids} | self.pinned) > len(self.places):
            raise RuntimeError(
                f"max_loras={len(self.places)} adapters are in use, a request needs another: "
                "schedule it later, or raise max_loras"
            )

    def _place_of(self, lora_id: int, held: Collection[int]) -> int:
        """Returns the place of an adapter, in that of one that is neither held nor pinned."""
        if lora_id in self.places:
            place = self.places.index(lora_id)
        else:
            kept = {*held} | self.pinned
            free = [place for place in self._order if self.places[place] not in kept]
            place = next((p for p in free if not self.places[p]), free[0])
            self._write(place, self.known[lora_id])
            self.places[place] = lora_id
        self._order.remove(place)
        self._order.append(place)
        return place

    def register(self, adapter: Adapter) -> None:
        """Takes an adapter, in place of one with its id; at once where that is on the device."""
        self.known[adapter.lora_id] = adapter
        if adapter.lora_id in self.places and self._stacks is not None:
            self._write(self.places.index(adapter.lora_id), adapter)

    def forget(self, lora_id: int) -> None:
        """Drops an adapter that no request has."""
        del self.known[lora_id]
        self.pinned.discard(lora_id)
        if lora_id in self.places:
            self.places[self.places.index(lora_id)] = 0

    def pin(self, lora_id: int, in_use: Collection[int]) -> None:
        """Brings an adapter to the device, where it stays; raises as `admit`."""
        self.check({lora_id, *in_use})
        self._place_of(lora_id, in_use)
        self.pinned.add(lora_id)

    def _write(self, place: int, adapter: Adapter | None) -> None:
        matrices, tables = ({}, {}) if adapter is None else (adapter.matrices, adapter.saved)
        rank, written = self._program.engine.max_lora_rank, []
        for stage, stacks, write in zip(self._stages, self._stacks, self._put, strict=True):
            spec = _products(abstract_stacks(stage))
            values = {path: _padded(of, matrices.get(path), rank) for path, of in spec.items()}
            saved = {
                name: put(of, place, tables.get(name.removeprefix(SAVED)))
                for name, of in stacks.items()
                if name not in spec
            }
            written.append(write(_products(stacks), values, np.int32(place)) | saved)
        self._stacks = tuple(written)


def _putter(program: Program) -> Any:
    """Returns `_put`, compiled once for the stacks of a stage."""
    where = jax.tree.map(lambda x: x.sharding, _products(abstract_stacks(program)))
    out = where if program.mesh is not None else None
    return jax.jit(_put, donate_argnums=0, out_shardings=out)


def _products(stacks: Any) -> Any:
    """Returns the stacks of products, without what adapters have in place of other weights."""
    return {name: of for name, of in stacks.items() if not name.startswith(SAVED)}


def _put(stacks: Any, values: Any, place: Any) -> Any:
    """Writes an adapter's matrices, [blocks, rank, ...], into a place of the stacks."""
    return {
        path: type(stack)(
            stack.a.at[:, place].set(values[path][0]), stack.b.at[:, place].set(values[path][1])
        )
        for path, stack in stacks.items()
    }


def _padded(stack: Any, pair: Any, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns matrices of all modules of a product as a place of its stack has them."""

    def one(array: np.ndarray | None, like: jax.ShapeDtypeStruct) -> np.ndarray:
        blocks, _, ranks, *rest = like.shape
        out = np.zeros((blocks * ranks // rank, rank, *rest), like.dtype)
        if array is not None:
            out[:, : array.shape[1]] = array
        return out.reshape(blocks, ranks, *rest)

    a, b = (None, None) if pair is None else pair
    return one(a, stack.a), one(b, stack.b)


def device_adapters(program: Program) -> DeviceAdapters | None:
    """Returns the adapters of a runner; None where its engine has none."""
    return DeviceAdapters(program) if program.engine.enable_lora else None
