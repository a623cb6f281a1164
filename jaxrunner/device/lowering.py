"""Lowering of programs: from Python functions to the StableHLO that XLA compiles.

Python lowers one program at a time, and takes several seconds for a step with kernels. So child
processes lower too: a `LoweringProcess` has no device, lowers for the device of its parent, and
sends back the program as `jax.export` serialises it. The parent compiles it.
"""

from collections.abc import Callable
import contextlib
import functools
import importlib.util
import inspect
import io
import os
import pickle
import subprocess
import sys
from typing import Any, NamedTuple

import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from jaxrunner.device.build import Build
from jaxrunner.device.parts import cutting

# JAX's settings that change how a function is traced: a lowering process gets its parent's.
SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans", "jax_default_prng_impl",
    "jax_threefry_partitionable", "jax_numpy_rank_promotion", "jax_numpy_dtype_promotion",
)  # fmt: skip
# A child imports from its parent's path, and does not open the device.
CHILD = """import sys; sys.path[:] = {path!r}
import jax; jax.config.update("jax_platforms", "cpu")
from jaxrunner.device.lowering import serve; serve()"""


class Spec(NamedTuple):
    """The specification that a program is compiled from. Warm-up and dispatch both read `args`."""

    function: Callable[..., Any]  # called as function(*args, **static)
    static: tuple[tuple[str, Any], ...]  # hashable
    args: tuple[Any, ...]  # abstract arguments
    out: Any = None  # a tree with the structure of what it returns
    donated: tuple[str, ...] = ("state",)
    options: tuple[tuple[str, str], ...] = ()  # XLA's
    is_small: bool = False  # lowers fast, so not worth sending to a process


def lower(spec: Spec) -> Build:
    """Lowers a function in this process."""
    leaves, treedef = jax.tree.flatten(spec.args)
    return _lower(spec._replace(args=tuple(leaves), out=None), treedef)


@functools.lru_cache(maxsize=512)
def _lower(spec: Spec, treedef: Any) -> Build:
    """As `lower`, of flat arguments. Engines of equal sizes in one process share the result."""
    args = jax.tree.unflatten(treedef, spec.args)
    names = [name for name, _ in spec.static]
    jitted = jax.jit(spec.function, static_argnames=names, donate_argnames=spec.donated)
    traced = jitted.trace(*args, **dict(spec.static))
    if jax.default_backend() != "cpu":
        return Build(traced.lower(), dict(spec.options))
    return Build(cutting.cut(traced) or traced.lower(), {})  # the options are of GPUs


def run_eagerly(spec: Spec, *args: Any) -> Any:
    """Runs a function without lowering it: each operation by itself."""
    with jax.disable_jit():
        return spec.function(*jax.tree.map(jnp.asarray, args), **dict(spec.static))


def output_bytes(executable: Any) -> int:
    """Returns the bytes of a program's outputs that do not alias a donated argument.

    Returns 0 where the backend has no memory analysis, as for some loaded executables.
    """
    memory = executable.memory_analysis()
    return 0 if memory is None else memory.output_size_in_bytes - memory.alias_size_in_bytes


def extra_bytes(executable: Any) -> int:
    """Returns the bytes a program takes beside its arguments: temporaries and `output_bytes`."""
    memory = executable.memory_analysis()
    return 0 if memory is None else memory.temp_size_in_bytes + output_bytes(executable)


def num_cores() -> int:
    """Returns how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Died(Exception):
    """A lowering process has ended, or its program cannot be sent."""


class LoweringProcess:
    """The parent's handle of a child process that lowers programs, one at a time.

    task: bytes from `lowering_task`.
    """

    def __init__(self, task: bytes):
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD.format(path=[str(path) for path in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._send(task)

    def lower(self, key: Any, spec: Spec) -> Build:
        """Returns the lowered program of `key`; `spec` is this process's own `Spec` of it.

        Raises:
          Died: the process has ended, or the program cannot be exported.
        """
        self._send(pickle.dumps(key))
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, OSError, ValueError, pickle.UnpicklingError) as error:
            raise Died(f"the process ended, status {self._process.poll()}") from error
        if isinstance(answer, str):
            raise Died(answer)
        exported = export.deserialize(bytearray(answer))

        def function(*args: Any) -> Any:
            leaves = exported.call(*jax.tree.leaves(args))
            return jax.tree.unflatten(jax.tree.structure(spec.out), leaves)

        function.__name__ = spec.function.__name__  # as profiles show it
        names = list(inspect.signature(spec.function).parameters)
        donated = [names.index(name) for name in spec.donated]
        lowered = jax.jit(function, donate_argnums=donated).lower(*spec.args)
        return Build(lowered, dict(spec.options))

    def kill(self) -> None:
        """Kills the process, from any thread; a `lower` that waits for it raises `Died`."""
        self._process.kill()

    def close(self) -> None:
        """Kills the process, waits until it has ended, and closes its pipes."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # unsent data of a broken pipe
                pipe.close()

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended: reading its answer fails
            self._process.stdin.write(data)
            self._process.stdin.flush()


def lowering_task(spec: Callable[..., Any], *args: Any) -> bytes | None:
    """Returns the bytes that set a `LoweringProcess` up: `spec(*args, key)` is the `Spec` of a key.

    Returns None where they cannot be pickled, or JAX cannot export programs here.
    """
    # `jax.export` serialises with flatbuffers, an optional package.
    if not sys.executable or importlib.util.find_spec("flatbuffers") is None:
        return None
    device, described = jax.local_devices()[0], None
    if device.platform != "cpu":  # kernels ask for the device that they are lowered for
        mesh = Mesh(np.array([device]), ("x",)).abstract_mesh
        described = getattr(mesh, "abstract_device", None)
    settings = {name: getattr(jax.config, name) for name in SETTINGS}
    task = settings, export.default_export_platform(), described, spec, args
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(task)
        return buffer.getvalue()
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


class _Pickler(pickle.Pickler):
    """Pickles a mesh as an abstract one, without devices: the child has none of them."""

    def reducer_override(self, obj: Any) -> Any:
        """Returns an abstract mesh in place of a mesh."""
        return (_itself, (obj.abstract_mesh,)) if isinstance(obj, Mesh) else NotImplemented


def _itself(value: Any) -> Any:
    return value


def serve() -> None:
    """Runs in the child: reads the task, then answers each key with a program or an error text."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    settings, platform, device, spec, args = pickle.load(sys.stdin.buffer)
    for name, value in settings.items():
        jax.config.update(name, value)
    with contextlib.ExitStack() as stack:
        if device is not None:
            mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        while True:
            try:
                key = pickle.load(sys.stdin.buffer)
            except EOFError:
                return
            try:
                answer = _export(spec(*args, key), platform)
            except Exception as error:
                answer = f"{type(error).__name__}: {error}"
            pickle.dump(answer, answers)
            answers.flush()


def _export(spec: Spec, platform: str) -> bytes:
    """Returns a serialised program, whose arguments and results are flat lists of arrays."""
    leaves, treedef = jax.tree.flatten(spec.args)

    def flat(*leaves: Any) -> tuple[Any, ...]:
        args = jax.tree.unflatten(treedef, leaves)
        return tuple(jax.tree.leaves(spec.function(*args, **dict(spec.static))))

    return bytes(export.export(jax.jit(flat), platforms=[platform])(*leaves).serialize())
