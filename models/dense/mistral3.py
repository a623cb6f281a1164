"""Mistral Small 3.1 and Ministral 3 as they are published: a text model beside a vision tower, of
which nothing is read, for prompts are texts."""

from dataclasses import replace

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings
from jaxrunner.models.blocks.description import BlockConfig, Names
from jaxrunner.models.blocks.reading import SLIDING, block, read_block
from jaxrunner.models.dense import ministral3
from jaxrunner.models.text_config import text_settings

NAMES = Names(
    layer="language_model.model.layers.{}.",
    embed="language_model.model.embed_tokens",
    norm="language_model.model.norm",
    head="language_model.lm_head",
)
OF_TOWER = (
    "spatial_merge_size", "projector_hidden_act", "multimodal_projector_bias",
    "vision_feature_layer",
)  # fmt: skip
TIED = "tie_word_embeddings"


def read(settings: Settings) -> BlockConfig:
    """Reads a config whose `text_config` is a `mistral`, or a `ministral3`.

    Raises:
      ValueError: it is another, or has a setting that is not supported; names it.
    """
    settings.ignore(*OF_TOWER)
    outside = {TIED: settings.take(TIED, bool)} if TIED in settings else {}
    text = text_settings(settings, **outside)
    readers = dict(mistral=_read_mistral, ministral3=ministral3.read)
    kind = text.take("model_type", str, "mistral")
    if kind not in readers:
        raise ValueError(
            f"{text.source}: model_type must be one of {sorted(readers)}, got {shown(kind)}: "
            "other text models are not read beside a tower"
        )
    return replace(readers[kind](text), names=NAMES)


def _read_mistral(settings: Settings) -> BlockConfig:
    kinds = (SLIDING,) * settings.size("num_hidden_layers")
    return read_block(settings, head_dim=128, eps=1e-5, kinds=kinds)


mistral3 = block._replace(read=read, spare=("vision_tower.", "multi_modal_projector."))
