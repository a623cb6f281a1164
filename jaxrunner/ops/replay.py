"""Inputs of tokens that may be drafts, as a cache keeps them for the step that replays those kept.

Matrices follow from inputs by groups of heads, so that a shard of the groups has its own: what a
group's tokens bring lies side by side. What only reads the matrices is left out.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from jaxrunner.model import Recurrence
from jaxrunner.types import Array


def packed(rule: Recurrence, inputs: Any) -> Array:
    """Returns what the matrices follow from, of each token: [T, numbers], float32."""
    fields = _fields(rule, inputs)
    T, G = fields[0].shape[0], _num_groups(fields)
    parts = [x.reshape(T, G, -1).astype(jnp.float32) for x in fields]
    return jnp.concatenate(parts, -1).reshape(T, -1)


def unpacked(rule: Recurrence, kept: Array, like: Any) -> Any:
    """Returns inputs as `like`, [T, ...], whose tokens lie as those of `kept`, [..., numbers].

    What only reads the matrices is 0.
    """
    fields = _fields(rule, like)
    G, lead = _num_groups(fields), kept.shape[:-1]
    kept = kept.reshape(*lead, G, -1)
    found, start = {}, 0
    for field in dataclasses.fields(like):
        x = getattr(like, field.name)
        if field.name == rule.reads:
            found[field.name] = jnp.zeros((*lead, *x.shape[1:]), x.dtype)
            continue
        size = math.prod(x.shape[1:]) // G
        part = kept[..., start : start + size].reshape(*lead, *x.shape[1:])
        found[field.name], start = part.astype(x.dtype), start + size
    return dataclasses.replace(like, **found)


def _fields(rule: Recurrence, inputs: Any) -> list[Any]:
    names = [field.name for field in dataclasses.fields(inputs)]
    return [getattr(inputs, name) for name in names if name != rule.reads]


def _num_groups(fields: list[Any]) -> int:
    return min(x.shape[1] for x in fields)
