"""Qwen3.5, texts: Qwen3-Next with products of their own, and MLPs where there are no experts.

Rotation by time, height and width is the usual one in texts, where a token's place is all three.
"""

from collections.abc import Callable
import functools
from typing import Any

import numpy as np

from jaxrunner.hf_config import Settings
from jaxrunner.models.hybrids.hybrid import Params
from jaxrunner.models.hybrids.qwen3_next import (
    Qwen3NextConfig,
    qwen3_next,
    read_next,
    read_shared,
    sources,
)
from jaxrunner.models.mixtures.mixture import read_router
from jaxrunner.models.sources import by_groups, packed_source, renamed
from jaxrunner.models.text_config import text_settings
from jaxrunner.ops.routing import RouterConfig

OF_IMAGES = "mrope_section", "mrope_interleaved"  # which pairs are turned by which place
NAMES_OF_TWO = {"model.": "model.language_model."}
USUAL = dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512)


def read(settings: Settings) -> Qwen3NextConfig:
    """Reads a Qwen3.5 config of its text model."""
    none = (False,) * settings.size("num_hidden_layers")
    return read_next(
        _of_texts(settings), RouterConfig(1, 1), units="intermediate_size", sparse=none
    )


def read_moe(settings: Settings) -> Qwen3NextConfig:
    """Reads a config of Qwen3.5 with experts, of its text model."""
    settings = _of_texts(settings).with_defaults(**USUAL)
    settings = settings.with_defaults(intermediate_size=settings.size("moe_intermediate_size"))
    settings.expect("norm_topk_prob", True)
    router = read_router(settings, "num_experts", norm_topk_prob=True)
    return read_next(settings, router, **read_shared(settings))


def _of_texts(settings: Settings) -> Settings:
    settings.expect("attn_output_gate", True)
    settings.expect("output_gate_type", "swish", "silu")  # of delta nets
    settings.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # of layers that draft
    given = settings.take("rope_parameters", dict, {})
    rest = {key: value for key, value in given.items() if key not in OF_IMAGES}
    return settings.with_value("rope_parameters", rest)


def _read_of_two(read: Callable[[Settings], Any], settings: Settings) -> Qwen3NextConfig:
    """Reads a config that has a vision tower beside the text model."""
    return read(text_settings(settings, tie_word_embeddings=False))


def _sources(config: Qwen3NextConfig) -> Params:
    """Returns where each weight lies in a Hugging Face checkpoint."""
    return sources(config, _products)


def _products(c: Qwen3NextConfig, at: str) -> dict[str, Any]:
    m, E = c.mixer, c.hidden_size
    mixed = {f"{at}in_proj_qkv": m.channels, f"{at}in_proj_z": m.inner}
    rates = dict.fromkeys((f"{at}in_proj_b", f"{at}in_proj_a"), m.value_heads)
    rows = functools.partial(by_groups, m.key_heads, m.parts)
    return dict(mix_in=packed_source(mixed, rows, E), rates=packed_source(rates, np.stack, E))


def _sources_of_two(config: Qwen3NextConfig) -> Params:
    return renamed(_sources(config), NAMES_OF_TWO)


qwen3_5 = qwen3_next._replace(read=read, sources=_sources)
qwen3_5_moe = qwen3_5._replace(read=read_moe)
qwen3_5_of_two, qwen3_5_moe_of_two = (
    one._replace(
        read=functools.partial(_read_of_two, one.read),
        sources=_sources_of_two,
        spare=("mtp.", "model.visual."),
    )
    for one in (qwen3_5, qwen3_5_moe)
)
