"""Gemma 2 and 3, texts: four norms a layer, caps, windows. arXiv:2408.00118, arXiv:2503.19786."""

from dataclasses import replace
from typing import Any

from jaxrunner.config import read_scale
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, read_cap, read_kinds
from jaxrunner.models.rope import read_rope, read_two_ropes
from jaxrunner.models.text_config import text_settings

NAMES = Names(
    attn_end_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_end_norm="post_feedforward_layernorm",
)

NAMES_OF_TWO = replace(
    NAMES,
    layer="language_model.model.layers.{}.",
    embed="language_model.model.embed_tokens",
    norm="language_model.model.norm",
    head="language_model.lm_head",
)
TEXT_DEFAULTS = dict(  # of transformers, which published configs leave out
    vocab_size=262208, num_attention_heads=8, num_key_value_heads=4,
    max_position_embeddings=131072,
)  # fmt: skip


def read_2(settings: Settings) -> BlockConfig:
    """Reads a Gemma 2 config."""
    settings = settings.renamed(hidden_activation="hidden_act")
    rope = read_rope(settings, *_sizes(settings))
    return _read(settings, rope=rope, kinds=read_kinds(settings, 2), caps=(50.0, 30.0))


def read_3(settings: Settings) -> BlockConfig:
    """Reads a Gemma 3 config of its text model."""
    settings = settings.renamed(hidden_activation="hidden_act")
    local = "rope_local_base_freq", 1e4
    rope = read_two_ropes(settings, *_sizes(settings), theta=1e6, local=local)
    pattern = settings.size("_sliding_window_pattern", settings.size("sliding_window_pattern", 6))
    kinds = read_kinds(settings, pattern)
    # transformers, too, reads a cap of scores, and caps none.
    settings.expect("attn_logit_softcapping", None)
    return _read(settings, rope=rope, kinds=kinds, caps=(None, None), qk_norm=True)


def read_3_of_two(settings: Settings) -> BlockConfig:
    """Reads a Gemma 3 config that has a vision tower beside the text model, and nothing of the
    tower: prompts are texts."""
    settings.ignore("mm_tokens_per_image")
    text = text_settings(settings, tie_word_embeddings=True).with_defaults(**TEXT_DEFAULTS)
    return replace(read_3(text), names=NAMES_OF_TWO)


def _sizes(settings: Settings) -> tuple[int, int]:
    return settings.size("head_dim", 256), settings.size("max_position_embeddings", 8192)


def _read(
    settings: Settings, *, caps: tuple[float | None, float | None], **traits: Any
) -> BlockConfig:
    settings.expect("use_bidirectional_attention", False)
    bias = settings.take("attention_bias", bool, False)
    return read_block(
        settings,
        head_dim=256,
        activation="gelu_pytorch_tanh",
        tied=True,
        window=4096,
        norm="rms of 1 + w",
        qkv_bias=bias,
        o_bias=bias,
        score_scale=read_scale(settings, "query_pre_attn_scalar", 256.0) ** -0.5,
        score_cap=read_cap(settings, "attn_logit_softcapping", caps[0]),
        logit_cap=read_cap(settings, "final_logit_softcapping", caps[1]),
        embed_scale=settings.size("hidden_size") ** 0.5,
        names=NAMES,
        **traits,
    )


gemma2 = block._replace(read=read_2)
gemma3 = block._replace(read=read_3)
gemma3_of_two = block._replace(
    read=read_3_of_two, spare=("vision_tower.", "multi_modal_projector.")
)
