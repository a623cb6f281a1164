"""A recurrent state as a kind of cache: one block a request, which each token of it changes.

The state is of integers, so that it is right or wrong: `total` becomes 3 * total + token, modulo
`STATES`, and `last` holds the tokens before. A token is offset by one of `STATES` vectors.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrunner.caches.cache_group import CacheKind, distinct
from jaxrunner.caches.one_block import OneBlock
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model, Ops
from jaxrunner.models import llama
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.types import Array, Inputs
from tests.outside.sources import whole

STATES, DEPTH = 7, 3  # values of `total`, and tokens that `last` holds


@pytree
class StateCache:
    """The states of all requests, in one layer."""

    total: Array = leaf("N")
    last: Array = leaf("N depth")  # the oldest first, -1 for none


@dataclass(frozen=True)
class RecurrentState(OneBlock):
    """A block is the state of a whole request."""

    depth: int
    leaves: ClassVar[type] = StateCache

    @property
    def dims(self) -> dict[str, Any]:
        """How many tokens the state holds."""
        return dict(depth=self.depth)


@dataclass(frozen=True)
class Config(DecoderConfig):
    """A Llama of which a recurrent layer stands before the last layer."""

    depth: int = DEPTH

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """What Llama's layers keep, and what the recurrent one does."""
        return *super().cache_kinds, RecurrentState(self.depth)

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return super().dims | dict(states=STATES)


@pytree
class Params:
    """Weights of a Llama, and what each state adds."""

    decoder: llama.Params
    offsets: Array = leaf("states E", "param")


def read(settings: Settings) -> Config:
    """Reads config.json."""
    return Config(**vars(llama.read(settings)))


def embed(config: Config, params: Params, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E]."""
    return llama.embed(config, params.decoder, inputs)


def layers(
    config: Config, params: Params, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    *, first: int = 0, last: int | None = None, extras: tuple[str, ...] = (),
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs all layers: those of Llama in two parts, the recurrent one between them."""
    cut, group = (
        config.num_hidden_layers - 1,
        distinct(config.cache_kinds).index(RecurrentState(config.depth)),
    )
    run, decoder = llama.layers, params.decoder
    x, before, _ = run(config, decoder, x, kv[:cut], inputs, ops, last=cut)
    index, states = advance(kv[-1], ops, group)
    x = x + params.offsets[index]
    hidden, behind, _ = run(config, decoder, x, kv[cut:-1], inputs, ops, first=cut)
    return hidden, (*before, *behind, states), {}


def logits(config: Config, params: Params, hidden: Array) -> Array:
    """Scores every token of the vocabulary."""
    return llama.logits(config, params.decoder, hidden)


def advance(cache: StateCache, ops: Ops, group: int) -> tuple[Array, StateCache]:
    """Takes in the tokens of a step, in their order. Returns the offset of each, [T], and states.

    A request's first token starts a new state, whoever had the block before.
    """
    batch = ops.batch
    assert batch is not None, "a trainer has no states"
    none = cache.total.shape[0]
    block = batch.blocks[group].at[batch.row, 0].get(mode="fill", fill_value=none)

    def one(states: StateCache, token: tuple[Array, Array, Array]) -> tuple[StateCache, Array]:
        at, token_id, position = token
        total = jnp.where(position > 0, states.total.at[at].get(mode="fill", fill_value=0), 0)
        last = jnp.where(position > 0, states.last.at[at].get(mode="fill", fill_value=0), -1)
        total = (3 * total + token_id) % STATES
        index = (total + last[0]) % STATES
        last = jnp.concatenate([last[1:], token_id[None]])
        new = StateCache(
            states.total.at[at].set(total, mode="drop"), states.last.at[at].set(last, mode="drop")
        )
        return new, index

    tokens = block, batch.inputs.token_ids, batch.inputs.positions
    states, index = jax.lax.scan(one, cache, tokens)
    return index, states


def sources(config: Config) -> Params:
    """Returns where each weight lies in a checkpoint."""
    return host_value(
        Params,
        decoder=llama.sources(config),
        offsets=whole("model.offsets.weight", STATES, config.hidden_size),
    )


recurrent = Model(read, Params, embed, layers, logits, sources)


def expected_offsets(ids: list[int]) -> list[int]:
    """Returns the offset of each token, in plain Python."""
    total, last, found = 0, [-1] * DEPTH, []
    for token_id in ids:
        total = (3 * total + token_id) % STATES
        found.append((total + last[0]) % STATES)
        last = [*last[1:], token_id]
    return found


@dataclass(frozen=True)
class StatesAlone(Config):
    """A model that keeps states and nothing else, and has no heads."""

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """States of each layer."""
        return (RecurrentState(self.depth),) * self.num_hidden_layers

    @property
    def dims(self) -> dict[str, Any]:
        """Axis sizes and flags for `pytree`."""
        return {axis: size for axis, size in super().dims.items() if axis not in ("H", "K", "D")}
