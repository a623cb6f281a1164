"""The comparison of a model that pools: its hidden states behind the layers, and the pooled array.

The array is taken before its norm, softmax or sigmoid. Classes are compared behind their layers,
embeddings and rewards before theirs, which transformers does not have.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrunner.config import ModelConfig
from jaxrunner.heads import dense, pool
from jaxrunner.heads.pooled import Pooled, PooledConfig
from jaxrunner.model import Model
from jaxrunner.pytree import zeros
from jaxrunner.slot_table import partition
from jaxrunner.types import Array, Batch, Inputs

UNMAPPED = ("Mistral3ForConditionalGeneration",)  # which AutoModelForCausalLM does not know
SCORED = "ForSequenceClassification", "ForTokenClassification"


def reference(values: Mapping[str, Any], config: ModelConfig) -> str:
    """Returns the class of transformers for a checkpoint whose config.json holds `values`."""
    (name, *_) = values.get("architectures") or [""]
    if not isinstance(config, PooledConfig):
        return name if name in UNMAPPED else "AutoModelForCausalLM"
    return f"AutoModel{next((kind for kind in SCORED if name.endswith(kind)), '')}"


def inputs_of(model: Model, config: ModelConfig, ids: Array) -> Inputs:
    """Returns what a model reads of one text, [T]; of its tables, what a plain request has."""
    T = ids.size
    tables, _ = partition(model.tables)
    rows = {t.name: zeros(t.params, config.dims | dict(t.dims) | dict(R=T)) for t in tables}
    return Inputs(ids, jnp.arange(T), jnp.full(T, T), rows)


def batch_of(inputs: Inputs) -> Batch:
    """Returns a step of one text."""
    T = inputs.token_ids.size
    row, lens = jnp.zeros(T, jnp.int32), jnp.full(1, T)
    return Batch(inputs, row, row, (), jnp.array([0, T]), lens, (), jnp.full((1, 1), T - 1), T)


def ours(config: PooledConfig, params: Pooled, hidden: Array, batch: Batch, *, scored: bool) -> Any:
    """Returns what is pooled of hidden, [T, E]: [1, X], or [T, X] of all tokens.

    scored: whether the layers behind the pooling run.
    """
    if config.pooling in pool.STATELESS:
        x = pool.STATELESS[config.pooling](hidden, batch)
    else:
        kept = pool.Kept(jnp.zeros((1, hidden.shape[1])))
        x, _ = pool.KEEPING[config.pooling](hidden, batch, kept)
    return dense.run(config.layers, params.head, x) if scored else x


def theirs(config: PooledConfig, hidden: np.ndarray) -> np.ndarray:
    """Returns what is pooled of transformers' hidden states, [T, E]: [1, E], or [T, E]."""
    one = dict(LAST=hidden[-1:], CLS=hidden[:1], MEAN=hidden.mean(0, keepdims=True))
    return one.get(config.pooling, hidden)
