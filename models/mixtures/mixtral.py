"""Mixtral: Mistral with experts in all layers. arXiv:2401.04088."""

import functools
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    mixture,
    read_mixture,
    read_router,
    router_source,
    sources,
    stacked_source,
)


def read(settings: Settings) -> MixtureConfig:
    """Reads a Mixtral config."""
    router = read_router(settings, "num_local_experts", norm_topk_prob=True)
    window = settings.size("sliding_window", 0, least=0) or None
    windows = (window,) * settings.size("num_hidden_layers")
    return read_mixture(settings, router, units="intermediate_size", windows=windows)


def _experts(c: MixtureConfig, prefix: str) -> dict[str, Any]:
    at = f"{prefix}block_sparse_moe."
    experts = stacked_source(c, f"{at}experts.", gate="w1", up="w3", down="w2")
    return dict(router=router_source(c, f"{at}gate"), experts=experts)


mixtral = mixture._replace(read=read, sources=functools.partial(sources, of_experts=_experts))
