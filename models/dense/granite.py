"""Granite 3: Llama with scales of embeddings, scores, residuals and logits. arXiv:2403.03466."""

from jaxrunner.config import read_scale
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig
from jaxrunner.models.blocks.reading import block, read_block


def read(settings: Settings) -> BlockConfig:
    """Reads a Granite config."""
    bias = settings.take("attention_bias", bool, False)
    return read_block(
        settings,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=settings.take("mlp_bias", bool, False),
        embed_scale=read_scale(settings, "embedding_multiplier"),
        score_scale=read_scale(settings, "attention_multiplier"),
        residual_scale=read_scale(settings, "residual_multiplier"),
        logit_scale=1 / read_scale(settings, "logits_scaling"),
    )


granite = block._replace(read=read)
