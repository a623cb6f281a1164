"""Heads of which a part is rotated: where its dimensions are held.

Which dimensions of a head are which does not change a score, as long as queries and keys agree. So
the rotated ones are held where Llama's rotation finds its pairs, and the others turn by no angle.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrunner.model import Source


def held_dims(head_dim: int, turned: int) -> np.ndarray:
    """Returns the dimension of a checkpoint's head that each of ours is.

    Of `head_dim` the first `turned` are rotated, in pairs that are `turned` / 2 apart; ours are
    `head_dim` / 2 apart.
    """
    pairs, rest = np.arange(turned).reshape(2, -1), np.arange(turned, head_dim).reshape(2, -1)
    return np.concatenate([pairs, rest], 1).ravel()


def reordered_heads(layer: Any, config: Any, *, neighbours: bool = False) -> Any:
    """Returns the sources of a `llama.Attention`, queries, keys and their norms in our order.

    neighbours: whether dimensions 2i and 2i + 1 are turned together, of whole heads.
    """
    turned = 2 * sum(freq != 0 for freq in config.rope.inv_freq)
    dims = held_dims(config.head_dim, turned)
    if neighbours:
        dims = np.arange(config.head_dim).reshape(-1, 2).T.ravel()
    weight, bias = layer.qkv.weight, layer.qkv.bias
    qkv = replace(
        layer.qkv,
        weight=_reordered(weight, dims, packed=True),
        bias=None if bias is None else _reordered(bias, dims, packed=True),
    )
    if not config.qk_norm:
        return replace(layer, qkv=qkv)
    norms = {name: _reordered(getattr(layer, name), dims) for name in ("q_norm", "k_norm")}
    return replace(layer, qkv=qkv, **norms)


def _reordered(source: Source, dims: np.ndarray, *, packed: bool = False) -> Source:
    """Returns a source whose heads have their dimensions in another order.

    packed: whether the weight is [K, P, D, ...], of which values, the last of P, keep theirs.
    """

    def order(weight: np.ndarray, dims: np.ndarray) -> np.ndarray:
        if not packed:
            return weight[dims]
        return np.concatenate([weight[:, :-1, dims], weight[:, -1:]], 1)

    assert source.split is not None
    split = source.split
    return source._replace(
        join=lambda arrays: order(source.join(arrays), dims),
        split=lambda held: split(order(held, np.argsort(dims))),
    )
