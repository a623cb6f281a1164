"""A model whose steps return pooled hidden states in place of tokens.

Its logits are one column, zero, or NaN where hidden states are not finite: a request ends with the
only token there is once its prompt is computed, or with the error of a model that gave NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxrunner.config import ModelConfig, WrappingConfig
from jaxrunner.heads import dense, pool
from jaxrunner.heads.dense import DenseConfig, HeadParams
from jaxrunner.heads.head import Head
from jaxrunner.model import Model, Ops
from jaxrunner.pytree import host_value, part, pytree
from jaxrunner.types import Array, Batch, Inputs

POOLED, POSITIONS = "pooled", "pooled positions"  # names of heads


@pytree
class Pooled:
    """Weights of a model, and of what stands behind its pooling."""

    base: Any = part("base")
    head: Any = part("head")


@dataclass(frozen=True)
class PooledConfig(WrappingConfig):
    """The `ModelConfig` of a model that pools: the model's, and that of the head."""

    INNER = "base"
    model: Model = field(repr=False)
    base: ModelConfig
    task: str  # of `pooling.params.TASKS`
    pooling: str  # of `pooling.params.POOLING_TYPES`
    layers: tuple[DenseConfig, ...] = ()
    activation: str = "normalize"  # of `pooling.activations`
    use_activation: bool = True  # where a request does not say
    dimensions: int | None = None
    pairs: bool = False  # whether two texts are encoded as a pair, and not as one text
    matryoshka: tuple[int, ...] = ()  # `dimensions` that the checkpoint names; any where empty
    steps: bool = False  # whether scores of "ALL" tokens are those of steps: `pooling.steps`
    step_tag_id: int | None = None  # where a request does not say
    returned_token_ids: tuple[int, ...] = ()  # columns of the scores, all where empty

    @property
    def longest_len(self) -> int:
        """The model's positions, and the place of the token that ends a request."""
        return self.base.longest_len + 1

    @property
    def num_out(self) -> int:
        """Numbers that are returned of a prompt, or of a token."""
        return self.layers[-1].outputs if self.layers else self.base.hidden_size

    def check_dimensions(self, dimensions: int | None) -> None:
        """Checks that an embedding may be cut to its first `dimensions`.

        Raises:
          ValueError: it may not.
        """
        if dimensions is None:
            return
        if not self.task.endswith("embed") or dimensions > self.num_out:
            raise ValueError(
                f"dimensions={dimensions} must be at most the {self.num_out} of an embedding, and "
                f"this LLM is for {self.task}: ask for fewer, or leave it out"
            )
        if self.matryoshka and dimensions not in self.matryoshka:
            raise ValueError(
                f"dimensions={dimensions} must be one of matryoshka_dimensions in config.json, "
                f"{list(self.matryoshka)}: others were not trained"
            )

    @property
    def dims(self) -> dict[str, Any]:
        """The dims of the model, and those of both parts of `Pooled`."""
        own = dict(dense=[layer.dims for layer in self.layers], kinds={})
        parts = dict(base=(self.model.params, {}), head=(HeadParams, own))
        return self.base.dims | parts | dict(num_out=self.num_out)

    @property
    def code(self) -> tuple[Callable[..., Any], ...]:
        """The functions that are compiled in."""
        return self.model.embed, self.model.layers


def pooled(model: Model, config: PooledConfig) -> Model:
    """Returns the family of `config`, of a model that would sample."""
    return Model(
        read=model.read,
        params=Pooled,
        embed=embed,
        layers=layers,
        logits=logits,
        sources=sources,
        tables=model.tables,
        heads=heads(config.pooling),
        spare=(*model.spare, "lm_head."),
        samples=False,
    )


def heads(pooling: str) -> tuple[Head, ...]:
    """Returns the heads whose arrays a step returns."""
    if pooling == "ALL":
        of_tokens = Head(POSITIONS, "T", tell_positions, jnp.int32)
        return Head(POOLED, "T num_out", tell), of_tokens
    if pooling in pool.STATELESS:
        return (Head(POOLED, "B num_out", tell),)
    return (Head(POOLED, "B num_out", tell_kept, table=pool.KEPT),)


def tell(config: PooledConfig, params: Pooled, hidden: Array, batch: Batch) -> Array:
    """Returns what is pooled of this step alone, [B, X] or [T, X]."""
    return dense.run(config.layers, params.head, pool.STATELESS[config.pooling](hidden, batch))


def tell_kept(
    config: PooledConfig, params: Pooled, hidden: Array, batch: Batch, kept: Any
) -> tuple[Array, Any]:
    """Returns what is pooled of this step and those before, [B, X], and what to keep."""
    x, kept = pool.KEEPING[config.pooling](hidden, batch, kept)
    return dense.run(config.layers, params.head, x), kept


def tell_positions(config: PooledConfig, params: Pooled, hidden: Array, batch: Batch) -> Array:
    """Returns the position of each token, [T]: a preempted prompt is returned twice."""
    return batch.inputs.positions


def embed(config: PooledConfig, params: Pooled, inputs: Inputs) -> Array:
    """Returns the embeddings of the tokens, [T, E]."""
    return config.model.embed(config.base, params.base, inputs)


def layers(
    config: PooledConfig, params: Pooled, x: Array, kv: tuple[Any, ...], inputs: Inputs, ops: Ops,
    **kwargs: Any,
) -> tuple[Array, tuple[Any, ...], dict[str, Array]]:  # fmt: skip
    """Runs the model's layers."""
    return config.model.layers(config.base, params.base, x, kv, inputs, ops, **kwargs)


def logits(config: PooledConfig, params: Pooled, hidden: Array) -> Array:
    """Returns 0 for each hidden state, [..., 1], NaN for one that is not finite."""
    good = jnp.isfinite(hidden).all(-1, keepdims=True)
    return jnp.where(good, 0.0, jnp.nan).astype(hidden.dtype)


def sources(config: PooledConfig) -> Pooled:
    """Returns where each weight lies in a checkpoint."""
    of_head = dense.sources(config.layers)
    return host_value(Pooled, base=config.model.sources(config.base), head=of_head)
