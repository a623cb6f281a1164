"""DeepSeek-V2 and V3, and models of their kind: latent attention over mixtures.

Shared experts, the first layers dense, experts of the best groups. arXiv:2405.04434, 2412.19437.
"""

import functools
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings
from jaxrunner.models.mixtures.latent import (
    LatentConfig,
    LatentLayer,
    Params,
    attention_sources,
    read_latent,
)
from jaxrunner.models.mixtures.mixture import (
    mixture,
    qwen_experts,
    read_balanced_router,
    read_mixture,
    read_router,
    sources,
)
from jaxrunner.ops.routing import RouterConfig

KINDS = ("dense", "sparse")  # of a layer's MLP
COUNTS = "n_routed_experts", "num_local_experts", "num_experts"  # names of one setting
GREEDY, OF_GROUPS = "greedy", "group_limited_greedy"
# The layers that draft follow the last one: of DeepSeek-V3, and of GLM-4.7-Flash.
V3_DRAFTS, FLASH_DRAFTS = ("model.layers.61.",), ("model.layers.47.",)


def read_v2(settings: Settings) -> LatentConfig:
    """Reads a DeepSeek-V2 config."""
    settings.expect("scoring_func", "softmax")
    settings.expect("norm_topk_prob", False)
    method = settings.take("topk_method", str, GREEDY)
    settings.expect("topk_method", GREEDY, OF_GROUPS)
    groups = dict(
        n_group=settings.size("n_group", 1), topk_group=settings.size("topk_group", 1)
    ) if method == OF_GROUPS else {}  # fmt: skip
    settings.ignore("n_group", "topk_group")
    scale = settings.take("routed_scaling_factor", float, 1.0)
    router = read_router(
        settings, *COUNTS, scoring="softmax", ranking_experts=1, routed_scaling_factor=scale,
        **groups,
    )  # fmt: skip
    return _read(settings, router, _behind(settings, 0))


def read_v3(settings: Settings) -> LatentConfig:
    """Reads a config of DeepSeek-V3's kind: Kimi-K2 and Moonlight, too."""
    return _read(settings, _sigmoid_router(settings, 8, 4), _behind(settings, 3), choice_bias=True)


def read_flash(settings: Settings) -> LatentConfig:
    """Reads a config of GLM-4.7-Flash's kind.

    Raises:
      ValueError: `mlp_layer_types` names other kinds, or another number of them.
    """
    num, dense = settings.size("num_hidden_layers"), settings.size("first_k_dense_replace", 1)
    default = [KINDS[i >= dense] for i in range(num)]
    kinds = settings.each("mlp_layer_types", str, default)
    if len(kinds) != num or not set(kinds) <= {*KINDS}:
        raise ValueError(
            f"mlp_layer_types must name {' or '.join(KINDS)} for {num} layers, got {shown(kinds)}"
        )
    sparse = tuple(kind == "sparse" for kind in kinds)
    return _read(settings, _sigmoid_router(settings, 1, 1), sparse, choice_bias=True)


def _behind(settings: Settings, default: int) -> tuple[bool, ...]:
    """Returns which layers have experts: those behind the first few."""
    dense = settings.size("first_k_dense_replace", default, least=0)
    return tuple(i >= dense for i in range(settings.size("num_hidden_layers")))


def _sigmoid_router(settings: Settings, groups: int, best: int) -> RouterConfig:
    """Reads a router that is balanced by a bias; groups, and the best of them, by default."""
    settings.expect("scoring_func", "sigmoid")
    settings.expect("topk_method", "noaux_tc")
    return read_balanced_router(settings, *COUNTS, groups=groups, best=best)


def _read(
    settings: Settings, router: RouterConfig, sparse: tuple[bool, ...], **flags: Any
) -> LatentConfig:
    """Reads what all have in common. sparse: which layers have experts."""
    settings.expect("moe_layer_freq", 1)
    settings.expect("mlp_bias", False)
    # Of training and of programs that serve; layers that draft are not read.
    settings.ignore("aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers")
    settings.ignore("num_mtp_layers")
    interleaved = settings.take("rope_interleave", bool, True)
    attention = read_latent(settings, interleaved=interleaved)
    shared = settings.size("n_shared_experts", 1, least=0)
    return read_mixture(
        settings,
        router,
        kind=LatentConfig,
        sparse=sparse,
        head_dim=settings.size("qk_rope_head_dim"),
        shared_expert_intermediate_size=shared * settings.size("moe_intermediate_size"),
        **attention,
        **flags,
    )


deepseek_v2 = mixture._replace(
    read=read_v2,
    params=Params,
    sources=functools.partial(
        sources,
        of_experts=functools.partial(qwen_experts, shared="shared_experts"),
        params=Params,
        layer=LatentLayer,
        of_attention=attention_sources,
    ),
)
deepseek_v3 = deepseek_v2._replace(read=read_v3, spare=V3_DRAFTS)
glm4_moe_lite = deepseek_v2._replace(read=read_flash, spare=FLASH_DRAFTS)
