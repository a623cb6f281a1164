"""Embeddings and heads that adapters have in place of the model's: PEFT's `modules_to_save`.

Each place of adapters has a whole matrix of each, [V, E]; a token is embedded by that of its own
adapter, and a row that is scored has its head.
"""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.indexing import take
from jaxrunner.linear import Linear
from jaxrunner.lora.table import ADAPTERS
from jaxrunner.model import Model
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array, Inputs, State

EMBED, HEAD = "embed", "head"  # fields of a model's weights
TIED_HEAD = "lm_head"  # trainers' name of a head that is the embedding


@pytree
class SavedModule:
    """The matrices of all adapters for one module, and which adapters have one."""

    tables: tuple[Array, ...]  # of each place; one alone is written when an adapter comes
    has: Array = leaf("lora_places", jnp.bool)


@pytree
class AdaptedParams:
    """Weights of a model, and what adapters have in place of some, by the field's name."""

    params: Any
    saved: dict[str, SavedModule]


def weights_of(params: Any) -> Any:
    """Returns the model's own weights."""
    return params.params if isinstance(params, AdaptedParams) else params


def embed_tokens(model: Model, config: Any, params: Any, inputs: Inputs) -> Array:
    """Embeds tokens as `Model.embed` does, each by its own adapter's embedding, [T, E]."""
    own = weights_of(params)
    x = model.embed(config, own, inputs)
    if not isinstance(params, AdaptedParams) or EMBED not in params.saved:
        return x
    saved, place = params.saved[EMBED], inputs.tables[ADAPTERS.name].place
    for i, table in enumerate(saved.tables):
        here = saved.has[i] & (place == i + 1)
        x = jnp.where(here[:, None], model.embed(config, _with(own, EMBED, table), inputs), x)
    return x


def score_rows(of: Any, params: Any, hidden: Array, place: Array, *, whole: bool) -> Array:
    """Returns logits as `of(weights, hidden)` does, [..., V], each row by its adapter's head.

    place: [...], of each row's adapter, plus one. whole: whether one device has it all, so that
    heads of adapters that no row has need not be read.
    """
    assert isinstance(params, AdaptedParams)
    y = of(params.params, hidden)
    if HEAD not in params.saved:
        return y
    saved = params.saved[HEAD]
    for i, table in enumerate(saved.tables):
        here = saved.has[i] & (place == i + 1)
        of_it = functools.partial(_scored, of, params.params, hidden, here, table)
        y = jax.lax.cond(here.any(), of_it, lambda y: y, y) if whole else of_it(y)
    return y


def _scored(of: Any, own: Any, hidden: Array, here: Array, table: Array, y: Array) -> Array:
    return jnp.where(here[..., None], of(_with(own, HEAD, table), hidden), y)


def places_of_rows(params: Any, state: State, slot: Array, at: Any = ...) -> Array | None:
    """Returns the place of the adapters of tokens, plus one; None without such adapters.

    slot: [T]. at: [...], of the tokens; all where not given.
    """
    if not isinstance(params, AdaptedParams):
        return None
    slot = slot[at]
    return take(state.tables[ADAPTERS.name].place, slot)


def _with(params: Any, field: str, table: Array) -> Any:
    """Returns weights with a matrix in the place of the embedding or of the head."""
    for part in ("target", "base"):  # beside a drafter's, and below a pooling
        if hasattr(params, part):
            return replace(params, **{part: _with(getattr(params, part), field, table)})
    if field == HEAD and isinstance(head := params.head, Linear):
        return replace(params, head=replace(head, weight=table))
    return replace(params, embed=table)  # the head of tied weights too


def put(saved: SavedModule, place: int, table: np.ndarray | None) -> SavedModule:
    """Writes an adapter's matrix, or that it has none, into a place; the old one is gone."""
    has = np.asarray(saved.has).copy()
    has[place] = table is not None
    tables = list(saved.tables)
    if table is not None:
        old = tables[place]
        spec = jax.ShapeDtypeStruct(old.shape, old.dtype, sharding=old.sharding)
        old.delete()
        tables[place] = jax.device_put(table.astype(spec.dtype), spec.sharding)
    return SavedModule(tuple(tables), jax.device_put(has, saved.has.sharding))
