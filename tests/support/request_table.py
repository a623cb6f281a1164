"""A request table of a few slots."""

from dataclasses import replace

import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.types import Requests

DIMS = dict(R=4, L=32, X=3, M=8, G=1)


def table(**changes) -> Requests:
    """An empty request table with some fields set."""
    full = dict(
        max_len=jnp.full(4, 32),
        stop_ids=jnp.full((4, 3), 61),
        blocks=(jnp.arange(32, dtype=jnp.int32).reshape(4, 8),),
    )
    changed = {name: jnp.asarray(value) for name, value in changes.items()}
    return replace(pytree.zeros(Requests, DIMS), **full | changed)
