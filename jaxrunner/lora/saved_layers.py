"""Layers behind a pooling that adapters have in place of the model's: PEFT's `modules_to_save`.

Each place of adapters has every weight of these layers; a row is scored by its own adapter's.
"""

from collections.abc import Callable
from dataclasses import replace
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.lora.saved_modules import EMBED, HEAD, AdaptedParams, SavedModule, weights_of
from jaxrunner.pytree import name_of
from jaxrunner.types import Array

OF_HEAD = "head."  # before paths, in the params, of what stands behind a pooling


class LayerWeight(NamedTuple):
    """A weight of a layer behind a pooling, in whose place adapters may have another."""

    path: str  # in the params
    name: str  # of its tensor
    shape: tuple[int, ...]


def run_head(
    run: Callable[..., Any], params: Any, given: tuple[Any, ...], place: Array | None
) -> Any:
    """Returns `run(weights, *given)`, [B, ...] or [T, ...], each row by its adapter's layers.

    place: [B] or [T], of each row's adapter, plus one; None where no adapter has layers.
    """
    own = weights_of(params)
    told = run(own, *given)
    if place is None or not (saved := _layers(params)):
        return told
    has = functools.reduce(operator.or_, (of.has for of in saved.values()))
    for i in range(len(has)):
        here = has[i] & (place == i + 1)
        of_it = functools.partial(_told, run, own, saved, i, given, here)
        told = jax.lax.cond(here.any(), of_it, lambda told: told, told)
    return told


def _layers(params: AdaptedParams) -> dict[str, SavedModule]:
    """Returns what adapters have of layers, by path."""
    return {path: of for path, of in params.saved.items() if path not in (EMBED, HEAD)}


def _told(
    run: Callable[..., Any], own: Any, saved: dict[str, SavedModule], i: int,
    given: tuple[Any, ...], here: Array, told: Any,
) -> Any:  # fmt: skip
    """Returns `told`, with the rows that are `here` by the layers in place `i`."""

    def one(old: Array, new: Array) -> Array:
        return jnp.where(here.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(one, told, run(_with(own, saved, i), *given))


def _with(own: Any, saved: dict[str, SavedModule], i: int) -> Any:
    """Returns weights with those in place `i`; its adapter need not have all."""

    def one(path: Any, weight: Array) -> Array:
        of = saved.get(OF_HEAD + name_of(path))
        return weight if of is None else jnp.where(of.has[i], of.tables[i], weight)

    return replace(own, head=jax.tree.map_with_path(one, own.head))
