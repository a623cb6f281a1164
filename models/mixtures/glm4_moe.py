"""GLM-4.5 to 4.7: DeepSeek-V3's router, and heads of which a half is rotated. arXiv:2508.06471.

Which dimensions of a head are which does not change a score, as long as queries and keys agree. So
the rotated ones are held where Llama's rotation finds its pairs, and the others turn by no angle.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.model import Source
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    mixture,
    qwen_experts,
    read_mixture,
    read_router,
    sources,
)

# The layers that draft, of GLM-4.5-Air and of the larger ones, follow the last one.
DRAFTS = ("model.layers.46.", "model.layers.92.")


def read(settings: Settings) -> MixtureConfig:
    """Reads a GLM-4.5 config."""
    router = read_router(
        settings,
        "n_routed_experts",
        "num_local_experts",
        scoring="sigmoid",
        norm_topk_prob=settings.take("norm_topk_prob", bool, True),
        n_group=settings.size("n_group", 1),
        topk_group=settings.size("topk_group", 1),
        routed_scaling_factor=settings.take("routed_scaling_factor", float, 1.0),
    )
    settings.size("num_nextn_predict_layers", 0, least=0)
    num_dense = settings.size("first_k_dense_replace", 1, least=0)
    units = settings.size("moe_intermediate_size")
    return read_mixture(
        settings,
        router,
        sparse=tuple(i >= num_dense for i in range(settings.size("num_hidden_layers"))),
        partial_rotary=0.5,
        qkv_bias=settings.take("attention_bias", bool, False),
        qk_norm=settings.take("use_qk_norm", bool, False),
        choice_bias=True,
        shared_expert_intermediate_size=units * settings.size("n_shared_experts", 1, least=0),
    )


def held_dims(head_dim: int, turned: int) -> np.ndarray:
    """Returns the dimension of a checkpoint's head that each of ours is.

    Of `head_dim` the first `turned` are rotated, in pairs that are `turned` / 2 apart; ours are
    `head_dim` / 2 apart.
    """
    pairs, rest = np.arange(turned).reshape(2, -1), np.arange(turned, head_dim).reshape(2, -1)
    return np.concatenate([pairs, rest], 1).ravel()


def _own(c: MixtureConfig, prefix: str) -> dict[str, Any]:
    return qwen_experts(c, prefix, shared="shared_experts")


def _sources(c: MixtureConfig) -> Any:
    """Returns where each weight lies, queries, keys and their norms in our order of dimensions."""
    dims = held_dims(c.head_dim, 2 * sum(freq != 0 for freq in c.rope.inv_freq))
    made = sources(c, _own)

    def one(layer: Any) -> Any:
        weight, bias = layer.qkv.weight, layer.qkv.bias
        qkv = replace(
            layer.qkv,
            weight=_reordered(weight, dims, packed=True),
            bias=None if bias is None else _reordered(bias, dims, packed=True),
        )
        if not c.qk_norm:
            return replace(layer, qkv=qkv)
        norms = {name: _reordered(getattr(layer, name), dims) for name in ("q_norm", "k_norm")}
        return replace(layer, qkv=qkv, **norms)

    return replace(made, layers=tuple(map(one, made.layers)))


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


glm4_moe = mixture._replace(read=read, sources=_sources, spare=DRAFTS)
