"""Makes a model from config.json, with products quantised as checkpoint or user say."""

from collections.abc import Mapping
from typing import Any

from jaxrunner.config import ModelConfig
from jaxrunner.hf_config import Settings
from jaxrunner.model import Model
from jaxrunner.models.registry import read_model
from jaxrunner.quantization.quantized_config import quantize
from jaxrunner.quantization.registry import read_method


def read_quantized(
    values: Mapping[str, Any], source: str, quantization: str | None = None
) -> tuple[Model, ModelConfig]:
    """Returns the family and the config of a checkpoint.

    source: what `values` are, in messages. quantization: what float weights become.

    Raises:
      ValueError: an architecture that we do not have, or a setting that is not supported.
    """
    rest, method = read_method(values, source, quantization)
    model, config = read_model(Settings(rest, source))
    return (model, config) if method is None else quantize(model, config, method)
