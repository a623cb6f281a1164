"""gpt-oss: experts with biases and a clamped SwiGLU, sinks, windows of every second layer.

arXiv:2508.10925.
"""

import functools
from typing import Any

import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.mixtures.experts import ALPHA, LIMIT, Experts
from jaxrunner.model import AttentionSpec, Ops, Source
from jaxrunner.models.llama import Turn
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    MixtureLayer,
    Params,
    mixture,
    read_mixture,
    read_router,
    router_source,
    sources,
)
from jaxrunner.models.sources import transposed_source
from jaxrunner.models.windows import layer_windows
from jaxrunner.pytree import each, host_value, leaf, nested, pytree
from jaxrunner.types import Array


@pytree
class GptOssLayer(MixtureLayer):
    """Weights of one layer."""

    experts: Experts | None = nested(
        X="experts", F="expert_units", bias="expert_bias", activation="clamped_swiglu",
        when="sparse",
    )  # fmt: skip
    sinks: Array = leaf("H", "param")

    def attend(
        self, config: MixtureConfig, ops: Ops, h: Array, turn: Turn, cache: Any, spec: AttentionSpec
    ) -> tuple[Array, Any]:
        """Returns what attention adds to the residual, given h, [T, E]; and the cache."""
        return super().attend(config, ops, h, turn, cache, spec._replace(sinks=self.sinks))


@pytree
class GptOssParams(Params):
    """Weights of the model."""

    layers: tuple[GptOssLayer, ...] = each("Y")


def read(settings: Settings) -> MixtureConfig:
    """Reads a gpt-oss config."""
    router = read_router(settings, "num_local_experts", "num_experts", scoring="softmax_of_chosen")
    settings.expect("experts_per_token", router.num_experts_per_tok)
    settings.expect("swiglu_alpha", ALPHA)
    settings.expect("swiglu_limit", LIMIT)
    settings.take("initial_context_length", int, 0)  # the rotary scaling names it again
    layers, bias = settings.size("num_hidden_layers"), settings.take("attention_bias", bool, True)
    window = settings.size("sliding_window", 0, least=0)
    windows = layer_windows(settings, window, [i % 2 == 0 for i in range(layers)])
    return read_mixture(
        settings,
        router,
        units="intermediate_size",
        windows=windows,
        qkv_bias=bias,
        o_bias=bias,
        expert_bias=True,
        router_bias=True,
        head_dim=64,
    )


def _experts(c: MixtureConfig, prefix: str) -> dict[str, Any]:
    at, X = f"{prefix}mlp.experts.", c.router.num_experts
    F, E = c.moe_intermediate_size, c.hidden_size
    bias = Source((f"{at}gate_up_proj_bias",), ((X, 2 * F),), _split_bias, _joined_bias)
    experts = host_value(
        Experts,
        gate_up=transposed_source(f"{at}gate_up_proj", (X, 2 * F, E), _split, _joined),
        down=transposed_source(f"{at}down_proj", (X, E, F)),
        gate_up_bias=bias,
        down_bias=Source.whole(f"{at}down_proj_bias", X, E),
        activation="clamped_swiglu",
    )
    sinks = Source.whole(f"{prefix}self_attn.sinks", c.num_attention_heads)
    return dict(router=router_source(c, f"{prefix}mlp.router"), experts=experts, sinks=sinks)


def _split(weight: np.ndarray) -> np.ndarray:
    """Returns [X, 2, F, E] of [X, 2 F, E], where gates and what they gate take turns."""
    X, rows, E = weight.shape
    return np.ascontiguousarray(np.swapaxes(weight.reshape(X, rows // 2, 2, E), 1, 2))


def _joined(held: np.ndarray) -> np.ndarray:
    return np.swapaxes(held, 1, 2).reshape(held.shape[0], -1, held.shape[3])


def _split_bias(arrays: list[np.ndarray]) -> np.ndarray:
    return _split(arrays[0][:, :, None])[..., 0]


def _joined_bias(held: np.ndarray) -> list[np.ndarray]:
    return [np.ascontiguousarray(_joined(held[..., None])[..., 0])]


gpt_oss = mixture._replace(
    read=read, params=GptOssParams,
    sources=functools.partial(
        sources, of_experts=_experts, params=GptOssParams, layer=GptOssLayer
    ),
)  # fmt: skip
