"""Weights of decoders with layers of `blocks`."""

from jaxrunner.linear import Linear
from jaxrunner.pytree import each, leaf, nested, pytree
from jaxrunner.types import Array


@pytree
class Norm:
    """Weights of a norm over hidden states."""

    norm_weight: Array = leaf("E", "param")
    norm_bias: Array | None = leaf("E", "param", when="bias")


@pytree
class Layer:
    """Weights of one layer. A KV head's query heads, key and value are packed along P.

    Dimensions of queries and keys are in such an order that those which are turned lie D / 2 apart,
    behind each half those that are not: scores do not depend on it, and one rotation serves all.
    """

    attn_norm: Norm | None = nested(bias="norm_bias", when="attn_norm")
    qkv: Linear = nested(outputs="K P D", inputs="E", bias="qkv_bias")
    q_norm: Array | None = leaf("D", "param", when="qk_norm")
    k_norm: Array | None = leaf("D", "param", when="qk_norm")
    q_width_norm: Array | None = leaf("all_heads D", "param", when="qk_width_norm")
    k_width_norm: Array | None = leaf("all_kv_heads D", "param", when="qk_width_norm")
    o: Linear = nested(outputs="E", inputs="H D", num_in=2, bias="o_bias")
    attn_end_norm: Norm | None = nested(bias="norm_bias", when="attn_end_norm")
    mlp_norm: Norm | None = nested(bias="norm_bias", when="mlp_norm")
    gate_up: Linear = nested(outputs="gate_up F", inputs="E", bias="mlp_bias")
    down: Linear = nested(outputs="E", inputs="F", bias="mlp_bias")
    mlp_end_norm: Norm | None = nested(bias="norm_bias", when="mlp_end_norm")


@pytree
class Params:
    """Weights of a decoder."""

    embed: Array = leaf("V E", "param")
    positions: Array | None = leaf("positions E", "param", when="learned")
    norm: Norm = nested(bias="norm_bias")
    head: Linear | None = nested(outputs="V", inputs="E", when="untied")
    layers: tuple[Layer, ...] = each("Y")
