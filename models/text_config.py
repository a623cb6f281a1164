"""Configs of models that see: what they say of the text model, which alone is read."""

from typing import Any

from jaxrunner.hf_config import Settings

OF_WHOLE = ("architectures", "dtype", "torch_dtype", "eos_token_id", "bos_token_id")
# The tokens that stand for images, by the names that families have for them.
TOKENS = tuple(
    f"{name}_token_{kind}"
    for name in ("boi", "eoi", "image", "video", "vision_start", "vision_end")
    for kind in ("index", "id")
)


def text_settings(settings: Settings, **defaults: Any) -> Settings:
    """Returns the settings of the text model; nothing of a tower is read, for prompts are texts.

    defaults: of what the outer config says for the whole.

    Raises:
      ValueError: the outer config has a setting that is unknown.
    """
    text = settings.section("text_config") or Settings({}, settings.source, "text_config")
    for key in (*OF_WHOLE, *defaults):
        if key in settings:  # keys outside count for the whole
            text = text.with_value(key, settings.take(key, (bool, object), None))
        elif key in defaults:
            text = text.with_value(key, defaults[key])
    settings.ignore("vision_config", "language_model_only", *TOKENS)
    settings.finish()
    return text
