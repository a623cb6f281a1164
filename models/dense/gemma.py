"""Gemma 2 and 3, texts: four norms a layer, caps, windows. arXiv:2408.00118, arXiv:2503.19786."""

from dataclasses import replace
from typing import Any

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import block, read_block, read_cap, read_kinds, read_scale
from jaxrunner.models.rope import read_rope, read_two_ropes

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
    text = settings.section("text_config") or Settings({}, settings.source, "text_config")
    for key, value in TEXT_DEFAULTS.items():
        text = text if key in text else text.with_value(key, value)
    for key in ("architectures", "dtype", "torch_dtype", "eos_token_id", "bos_token_id"):
        if key in settings:  # what is outside counts for the whole
            text = text.with_value(key, settings.take(key, object, None))
    settings.take("vision_config", dict, {})
    for key in ("boi", "eoi", "image"):
        settings.take(f"{key}_token_index", int, 0)
    settings.take("mm_tokens_per_image", int, 0)
    tied = settings.take("tie_word_embeddings", bool, True)
    settings.finish()
    config = read_3(text.with_value("tie_word_embeddings", tied))
    return replace(config, names=NAMES_OF_TWO)


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
