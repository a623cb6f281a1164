"""The layers behind a pooling that adapters may have in place of the model's, and their checks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrunner.heads import dense
from jaxrunner.heads.pooled import PooledConfig
from jaxrunner.lora.saved_layers import OF_HEAD, LayerWeight
from jaxrunner.lora.saved_modules import TIED_HEAD
from jaxrunner.model import Source
from jaxrunner.pytree import name_of


def find_layers(config: Any) -> tuple[LayerWeight, ...]:
    """Returns the weights of the layers that score.

    There are none in a model that embeds, nor where scores are logits of tokens.
    """
    if not isinstance(config, PooledConfig) or not config.task.endswith("classify"):
        return ()
    if any(layer.rows for layer in config.layers):
        return ()
    tree = dense.sources(config.layers)
    nodes = jax.tree.leaves_with_path(tree, is_leaf=lambda node: isinstance(node, Source))
    return tuple(
        LayerWeight(OF_HEAD + name_of(path), of.names[0], tuple(of.shapes[0])) for path, of in nodes
    )


def head_modules(config: Any) -> set[str]:
    """Returns the modules behind a pooling, which low ranks must not change unseen."""
    if not isinstance(config, PooledConfig):
        return set()
    tied = {TIED_HEAD} if any(layer.rows for layer in config.layers) else set[str]()
    return tied | {layer.name for layer in config.layers}


def check_layers(
    weights: Mapping[str, np.ndarray], known: Sequence[LayerWeight], source: str
) -> None:
    """Checks what an adapter has in place of layers, by path.

    Raises:
      ValueError: a weight has another shape, or values that are not finite; names it.
    """
    for path, name, shape in known:
        if (weight := weights.get(path)) is None:
            continue
        if weight.shape != shape:
            raise ValueError(
                f"{name} of {source} must be {list(shape)} as the model's is, got "
                f"{list(weight.shape)}: take an adapter of this model and its "
                f"num_labels={known[-1].shape[0]}"
            )
        if not np.isfinite(weight).all():
            raise ValueError(
                f"{name} of {source} holds values that are NaN or infinite: correct it"
            )
