"""EAGLE-3 heads as drafters: they read three hidden states of the model, see `eagle3_head`."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrunner.model import Ops
from jaxrunner.speculators import eagle3_head as head
from jaxrunner.speculators.drafter import Drafter, Target, own_or_shared_embed
from jaxrunner.speculators.eagle3_config import Eagle3Config, read
from jaxrunner.types import Array, Inputs


class _Product(NamedTuple):
    """Scores of the model, as the head takes them."""

    product: Any


def feature(
    config: Eagle3Config, params: head.Params, hidden: Array, extras: dict[str, Array]
) -> Array:
    """Returns what the layer reads of the model's states, [T, E]."""
    return head.feature(config, params, tuple(extras[name] for name in config.extras))


def layers(
    config: Eagle3Config, params: head.Params, x: Array, feature: Array, kv: tuple[Any, ...],
    inputs: Inputs, ops: Ops,
) -> tuple[Array, Array, tuple[Any, ...]]:  # fmt: skip
    """Runs the layer on x, embeddings [T, E], and the feature of the tokens before them, [T, E]."""
    hidden, fed_back, cache = head.layers(config, params, x, feature, kv[0], inputs, ops)
    return hidden, fed_back, (cache,)


def logits(config: Eagle3Config, params: head.Params, hidden: Array, target: Target) -> Array:
    """Scores every token, [..., V]: those that are not in the head's vocabulary have no chance."""
    scores = head.logits(config, params, _Product(target.logits), hidden)
    if params.d2t is None:
        return scores
    ids = head.to_target_ids(params, jnp.arange(scores.shape[-1]))
    all_ = jnp.full((*scores.shape[:-1], config.decoder.vocab_size), -jnp.inf, scores.dtype)
    return all_.at[..., ids].set(scores, unique_indices=True)


eagle3 = Drafter(
    "eagle3",
    head.Params,
    head.sources,
    own_or_shared_embed,
    feature,
    layers,
    logits,
    read=read,
    tensor_parallel=True,
)
