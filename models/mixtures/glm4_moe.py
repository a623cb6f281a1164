"""GLM-4.5 to 4.7: DeepSeek-V3's router, and heads of which a half is rotated. arXiv:2508.06471."""

from dataclasses import replace
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.models.mixtures.mixture import (
    MixtureConfig,
    mixture,
    qwen_experts,
    read_balanced_router,
    read_mixture,
    sources,
)
from jaxrunner.models.partial_rotary import reordered_heads

# The layers that draft, of GLM-4.5-Air and of the larger ones, follow the last one.
DRAFTS = ("model.layers.46.", "model.layers.92.")


def read(settings: Settings) -> MixtureConfig:
    """Reads a GLM-4.5 config."""
    router = read_balanced_router(settings, "n_routed_experts", "num_local_experts")
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


def _own(c: MixtureConfig, prefix: str) -> dict[str, Any]:
    return qwen_experts(c, prefix, shared="shared_experts")


def _sources(c: MixtureConfig) -> Any:
    """Returns where each weight lies, queries, keys and their norms in our order of dimensions."""
    made = sources(c, _own)
    return replace(made, layers=tuple(reordered_heads(layer, c) for layer in made.layers))


glm4_moe = mixture._replace(read=read, sources=_sources, spare=DRAFTS)
