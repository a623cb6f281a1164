"""Serialises executables, and loads them: whole programs and programs in parts."""

from collections.abc import Sequence
import io
import json
from typing import Any

import jax
from jax.experimental import serialize_executable
import jax.numpy as jnp
import numpy as np

from jaxrunner.device.parts.parts import Launch, Parts, Wiring

MAGIC = b"parts\n"  # before several serialised executables


def serialize(executable: Any) -> bytes:
    """Returns an executable, whole or in parts, as bytes for `load`."""
    if not isinstance(executable, Parts):
        return serialize_executable.serialize(executable)[0]
    programs, wiring, constants = executable.told
    bodies = [np.frombuffer(serialize(program), np.uint8) for program in programs]
    kinds = [constant.dtype.name for constant in constants]
    told = np.frombuffer(json.dumps((wiring, kinds)).encode(), np.uint8)
    file = io.BytesIO()
    raw = [np.frombuffer(constant.tobytes(), np.uint8) for constant in constants]
    shapes = [np.array(constant.shape, np.int64) for constant in constants]
    np.savez(file, told, *bodies, *raw, *shapes)
    return MAGIC + file.getvalue()


def load(data: bytes, takes: Any, gives: Any, devices: Sequence[Any]) -> Any:
    """Returns an executable from the bytes of `serialize`.

    takes, gives: the tree structures of (args, kwargs) and of its results.
    """
    if not data.startswith(MAGIC):
        return serialize_executable.deserialize_and_load(
            data, takes, gives, execution_devices=devices
        )
    with np.load(io.BytesIO(data[len(MAGIC) :])) as file:
        told, *arrays = (file[name] for name in file.files)
    (launches, *rest), kinds = json.loads(told.tobytes())
    wiring = Wiring(tuple(Launch(*launch) for launch in launches), *rest)
    num = len(kinds)
    raw, shapes = arrays[len(arrays) - 2 * num : len(arrays) - num], arrays[len(arrays) - num :]
    constants = [
        np.frombuffer(body.tobytes(), jnp.dtype(kind)).reshape(shape)
        for body, kind, shape in zip(raw, kinds, shapes, strict=True)
    ]
    of = {launch.program: launch for launch in wiring.launches}
    programs = []
    for i, body in enumerate(arrays[: len(arrays) - 2 * num]):
        own = jax.tree.structure(((*of[i].takes,), {})), jax.tree.structure([*of[i].gives])
        programs.append(load(body.tobytes(), *own, devices))
    return Parts(programs, wiring, constants, gives)
