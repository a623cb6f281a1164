"""Messages between stages in several processes: hidden states by devices, tokens by hosts.

A device runs its launches in order, so waiting on it for sampled tokens would stall it until the
last stage is done. Tokens go through the key-value store of `jax.distributed` instead.
"""

from collections.abc import Sequence
import secrets
import time
from typing import Any, cast

import jax
from jax._src import distributed  # the store has no public name
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.errors import StepTimeout
from jaxrunner.parallel.mesh import TENSOR
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import agreed_least
from jaxrunner.parallel.time_limit import arrives_within

STAGE = "stage"  # axis of the mesh of two stages
WAIT_MS = 1000  # for a key, before it is looked whether time is over


class StageLink:
    """Sends hidden states from a stage in one process to the next stage, in another process.

    Both processes make calls of `send` and `receive` in the same order.
    """

    def __init__(self, source: Mesh, target: Mesh):
        both = np.stack([source.devices.reshape(-1), target.devices.reshape(-1)])
        self._mesh = Mesh(both, (STAGE, TENSOR))
        self._is_source = source.devices.flat[0].process_index == jax.process_index()
        self._own = NamedSharding(source if self._is_source else target, PartitionSpec())
        self._at = NamedSharding(self._mesh, PartitionSpec(STAGE))
        self._sends = dict[tuple[Any, ...], Any]()  # programs, and what a target gives them

    def __str__(self) -> str:
        return " to ".join(str(device) for device in self._mesh.devices[:, 0])

    def check(self) -> None:
        """Sends a few numbers, or receives them in the other process, which makes the same call."""
        want = np.arange(8, dtype=np.float32)[:, None]
        if self._is_source:
            self.send(put(want, self._own))
        else:
            got = np.asarray(self.receive(want.shape, want.dtype))
            assert (got == want).all(), f"it gave {got}, not {want}"

    def send(self, x: jax.Array) -> None:
        """Sends x, [T, E], which each device of this stage has."""
        program, _ = self._program(x.shape, x.dtype)
        program(self._joined(x))

    def receive(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns the x, [T, E], that the other process sends, on each device of this stage."""
        program, nothing = self._program(shape, dtype)
        shards = [shard.data for shard in program(nothing).addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, self._own, shards)

    def prepare(self, shape: tuple[int, ...], dtype: Any) -> None:
        """Compiles the transfer of such arrays."""
        self._program(shape, dtype)

    def _program(self, shape: tuple[int, ...], dtype: Any) -> tuple[Any, jax.Array]:
        key = shape, jnp.dtype(dtype)
        if key not in self._sends:
            nothing = self._joined(put(np.zeros(shape, dtype), self._own))
            compiled = _send(self._mesh).lower(nothing).compile()
            self._sends[key] = compiled, nothing
        return self._sends[key]

    def _joined(self, x: jax.Array) -> jax.Array:
        """Returns this stage's part of what both have."""
        (T, *rest), shards = x.shape, [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays((2 * T, *rest), self._at, shards)


def _send(mesh: Mesh) -> Any:
    over = PartitionSpec(STAGE)
    return jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, STAGE, [(0, 1)]),
            mesh=mesh, in_specs=over, out_specs=over, check_vma=False,
        )
    )  # fmt: skip


def links_of(config: Any) -> tuple[StageLink | None, StageLink | None]:
    """Returns the links from the stage before this process's, and to the one behind."""
    meshes, held = [shard.mesh for shard in config.shards], config.held
    before = StageLink(*meshes[held[0] - 1 : held[0] + 1]) if held[0] else None
    behind = StageLink(*meshes[held[-1] : held[-1] + 2]) if held[-1] + 1 < len(meshes) else None
    return before, behind


class Post:
    """Broadcasts int32 vectors, in the order of launches, from the process that computes them."""

    def __init__(self, source: int):
        """source: its process. All make a post at the same time."""
        # Engines that follow each other have other keys.
        self._name = f"jaxrunner/{agreed_least(secrets.randbelow(2**31), shared=True)}"
        self._is_source, self._num = jax.process_index() == source, 0
        self._readers = [i for i in range(jax.process_count()) if i != source]

    def next(self, x: jax.Array | None = None) -> "Told":
        """Returns the next vector. x: the array, if this process's devices compute it."""
        self._num += 1
        key = f"{self._name}/{self._num}"
        if self._is_source:
            return Told(x, [f"{key}/{reader}" for reader in self._readers])
        return Told(None, [f"{key}/{jax.process_index()}"])


class Told:
    """A broadcast int32 vector that may be on its way; has the methods to wait for an array."""

    def __init__(self, x: jax.Array | None, keys: Sequence[str]):
        """x: the vector, where this process sends it, under all the keys; else it reads one."""
        self._x, self._keys = x, keys
        self._value: np.ndarray | None = None

    def copy_to_host_async(self) -> None:
        """Starts the copy from the device, in the process that has it."""
        if self._x is not None:
            self._x.copy_to_host_async()

    def is_ready(self) -> bool:
        """Whether the vector has arrived."""
        if self._x is not None:
            return cast(Any, self._x).is_ready()
        return self._value is not None

    def wait(self, timeout_s: float | None = None) -> np.ndarray:
        """Waits for the vector and returns it; broadcasts it first if this process has it.

        Raises:
          StepTimeout: it did not arrive in time.
        """
        if self._value is None:
            if self._x is not None:
                if timeout_s is not None and not arrives_within(timeout_s, [self._x]):
                    raise StepTimeout(
                        f"the device did not do a step in step_timeout_s={timeout_s}: end this "
                        "process"
                    )
                self._value = np.asarray(self._x)
                for key in self._keys:
                    _store().key_value_set_bytes(key, self._value.tobytes(), True)
            else:
                self._value = np.frombuffer(_taken(self._keys[0], timeout_s), np.int32)
        return self._value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.wait(), dtype)


def _store() -> Any:
    return distributed.global_state.client


def _taken(key: str, timeout_s: float | None) -> bytes:
    """Takes a value out of the store, once it is there."""
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        try:
            value = _store().blocking_key_value_get_bytes(key, WAIT_MS)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if end_s is not None and time.monotonic() > end_s:
                raise StepTimeout(
                    f"no process told the tokens of a step in step_timeout_s={timeout_s}: the last "
                    "stage's has ended, or its device hangs"
                ) from error
            continue
        _store().key_value_delete(key)
        return value
