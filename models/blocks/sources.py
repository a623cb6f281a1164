"""Where the weights of a decoder with layers of `blocks` lie in a Hugging Face checkpoint."""

from collections.abc import Callable
import functools

import numpy as np

from jaxrunner.linear import Linear
from jaxrunner.model import Source
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.weights import Layer, Norm, Params
from jaxrunner.models.sources import joined_source, linear_source, product_source
from jaxrunner.pytree import host_value

Join = Callable[[list[np.ndarray]], np.ndarray]


def sources(config: BlockConfig) -> Params:
    """Returns where each weight lies."""
    c, names = config, config.names
    V, E = c.vocab_size, c.hidden_size
    positions = Source.whole(f"{names.positions}.weight", c.max_position_embeddings, E)
    head = product_source(names.head, V, E)
    return host_value(
        Params,
        embed=Source.whole(f"{names.embed}.weight", V, E),
        positions=positions if names.positions else None,
        norm=norm_source(c, names.norm),
        head=None if c.tie_word_embeddings else head,
        layers=tuple(_layer(c, names.layer.format(i)) for i in range(c.num_hidden_layers)),
    )


def _layer(c: BlockConfig, at: str) -> Layer:
    names, E, F, D = c.names, c.hidden_size, c.intermediate_size, c.head_dim
    H, K = c.num_attention_heads, c.num_key_value_heads
    order = head_order(c)

    def norm(name: str) -> Norm | None:
        return norm_source(c, at + name) if name else None

    def of_heads(present: bool, name: str, *heads: int) -> Source | None:
        join = functools.partial(_ordered, order, (*heads, D))
        shape = (int(np.prod(heads)) * D,)
        return joined_source((f"{at}{name}.weight",), (shape,), join) if present else None

    width = c.qk_width_norm
    qkv = dict(zip(names.qkv, (H * D, K * D, K * D), strict=False))
    if len(qkv) == 1:
        qkv = dict.fromkeys(qkv, (H + 2 * K) * D)
    up = dict.fromkeys(names.gate_up, (2 if c.gated else 1) * F // len(names.gate_up))
    units = 2 if c.gated else 1
    return host_value(
        Layer,
        attn_norm=norm(names.attn_norm),
        qkv=_linear(c, at, qkv, E, functools.partial(_packed, c, order), c.qkv_bias),
        q_norm=of_heads(c.qk_norm, names.q_norm),
        k_norm=of_heads(c.qk_norm, names.k_norm),
        q_width_norm=of_heads(width, names.q_norm, H),
        k_width_norm=of_heads(width, names.k_norm, K),
        o=_linear(c, at, {names.o: E}, H * D, functools.partial(_inputs_of, (H, D)), c.o_bias, 2),
        attn_end_norm=norm(names.attn_end_norm),
        mlp_norm=norm(names.mlp_norm),
        gate_up=_linear(c, at, up, E, functools.partial(_outputs_of, (units, F)), c.mlp_bias),
        down=_linear(c, at, {names.down: E}, F, functools.partial(_inputs_of, (F,)), c.mlp_bias),
        mlp_end_norm=norm(names.mlp_end_norm),
    )


def head_order(c: BlockConfig) -> np.ndarray:
    """Returns which dimension of a head in a checkpoint each of ours is, [D].

    Dimensions that are turned together lie D / 2 apart here; behind each half, those never turned.
    """
    D, turned = c.head_dim, 2 * len(c.rope.inv_freq)
    pairs = np.arange(turned).reshape(-1, 2) if c.neighbours else np.arange(turned).reshape(2, -1).T
    still = np.arange(turned, D).reshape(2, -1).T
    return np.concatenate([pairs, still]).T.ravel()


def _linear(
    c: BlockConfig, at: str, tensors: dict[str, int], inputs: int, join: Join, bias: bool,
    num_in: int = 1,
) -> Linear:  # fmt: skip
    """Returns the source of a product of one or several tensors, with the outputs of each."""
    names, back = [at + name for name in tensors], c.names.transposed
    shapes = tuple((inputs, rows) if back else (rows, inputs) for rows in tensors.values())
    weight = joined_source(
        tuple(f"{name}.weight" for name in names), shapes, functools.partial(_turned, join, back)
    )
    rows = tuple((rows,) for rows in tensors.values())
    offset = joined_source(tuple(f"{name}.bias" for name in names), rows, join) if bias else None
    return linear_source(weight, offset, num_in=num_in)


def norm_source(c: BlockConfig, name: str) -> Norm:
    """Returns the source of a norm over hidden states."""
    weight, bias = (Source.whole(f"{name}.{part}", c.hidden_size) for part in ("weight", "bias"))
    return host_value(Norm, norm_weight=weight, norm_bias=bias if c.norm_bias else None)


def _turned(join: Join, back: bool, arrays: list[np.ndarray]) -> np.ndarray:
    return join([a.T for a in arrays] if back else arrays)


def _packed(c: BlockConfig, order: np.ndarray, arrays: list[np.ndarray]) -> np.ndarray:
    """Returns [K, P, D, ...] of three tensors, [heads * D, ...], or of one that has all."""
    K, D, inner = c.num_key_value_heads, c.head_dim, arrays[0].shape[1:]
    if c.names.by_head:
        heads = arrays[0].reshape(K, -1, D, *inner)
        q, k, v = heads[:, :-2], heads[:, -2:-1], heads[:, -1:]
    else:
        H = c.num_attention_heads
        flat = arrays if len(arrays) == 3 else np.split(arrays[0], [H * D, (H + K) * D])
        q, k, v = (a.reshape(K, -1, D, *inner) for a in flat)
    return np.concatenate([q[:, :, order], k[:, :, order], v], 1)


def _ordered(order: np.ndarray, shape: tuple[int, ...], arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0].reshape(shape)[..., order]


def _inputs_of(shape: tuple[int, ...], arrays: list[np.ndarray]) -> np.ndarray:
    """Splits the inputs of a product; a bias has none."""
    return arrays[0].reshape(arrays[0].shape[0], *shape) if arrays[0].ndim == 2 else arrays[0]


def _outputs_of(shape: tuple[int, ...], arrays: list[np.ndarray]) -> np.ndarray:
    """Splits the outputs of a product, which may come in several tensors."""
    return np.concatenate(arrays).reshape(*shape, *arrays[0].shape[1:])
