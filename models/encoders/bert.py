"""BERT, RoBERTa and XLM-R: learned positions, and a norm of each sum. arXiv:1810.04805,
arXiv:1907.11692, arXiv:1911.02116."""

from dataclasses import replace
import functools

from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import Names
from jaxrunner.models.blocks.reading import read_block
from jaxrunner.models.encoders.encoder import EncoderConfig, EncoderParams, encoder, sources
from jaxrunner.models.rope import no_rope

END = "output.LayerNorm"  # of a layer
OF_FIRST_FILES = (  # of Google's, which transformers does not read
    "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
    "pooler_size_per_head", "pooler_type",
)  # fmt: skip


def names(model: str) -> Names:
    """Returns what the tensors of `model`, "bert" or "roberta", are called."""
    self_attention = "attention.self."
    return Names(
        layer=f"{model}.encoder.layer.{{}}.",
        embed=f"{model}.embeddings.word_embeddings",
        positions=f"{model}.embeddings.position_embeddings",
        norm=f"{model}.embeddings.LayerNorm",  # of what the first layer reads
        attn_norm=END,
        mlp_norm="attention.output.LayerNorm",
        qkv=tuple(self_attention + name for name in ("query", "key", "value")),
        o="attention.output.dense",
        gate_up=("intermediate.dense",),
        down="output.dense",
    )


def read(settings: Settings, model: str = "bert") -> EncoderConfig:
    """Reads a config. model: what names of tensors begin with."""
    settings.ignore(*OF_FIRST_FILES)
    settings.expect("position_embedding_type", "absolute")
    settings.expect("is_decoder", False)
    settings.expect("add_cross_attention", False)
    num_types = settings.size("type_vocab_size", 2)
    # RoBERTa counts positions from behind that of padding, which no text has here.
    first = settings.take("pad_token_id", int, 1) + 1 if model == "roberta" else 0
    settings = settings.renamed(layer_norm_eps="rms_norm_eps")
    width = settings.size("hidden_size") // settings.size("num_attention_heads")
    config = read_block(
        settings,
        eps=1e-12,
        activation="gelu",
        tied=True,
        rope=no_rope(width),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated=False,
        norm="layer",
        norm_bias=True,
        post_norm=True,
        names=names(model),
    )
    types = f"{model}.embeddings.token_type_embeddings"
    return EncoderConfig(**vars(config), types=types, num_types=num_types, first_position=first)


def shifted(config: EncoderConfig) -> EncoderParams:
    """Returns where each weight lies: the norm of what a layer reads is the end of that before."""
    found = sources(config)
    ends = [layer.attn_norm for layer in found.layers]
    starts = [found.norm, *ends[:-1]]
    layers = tuple(
        replace(layer, attn_norm=norm) for layer, norm in zip(found.layers, starts, strict=True)
    )
    return replace(found, layers=layers, norm=ends[-1])


def _spare(model: str) -> tuple[str, ...]:
    named = "pooler.", "embeddings.position_ids", "embeddings.token_type_ids"
    return (*named, *(f"{model}.{name}" for name in named), "cls.", "lm_head.")


bert = encoder._replace(read=read, sources=shifted, spare=_spare("bert"))
roberta = encoder._replace(
    read=functools.partial(read, model="roberta"), sources=shifted, spare=_spare("roberta")
)
