"""Finds the format of quantised weights, from config.json or `LLM(quantization=...)`."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings
from jaxrunner.quantization.awq import AWQ
from jaxrunner.quantization.compressed_tensors import CompressedTensors
from jaxrunner.quantization.fp8 import Fp8
from jaxrunner.quantization.gptq import GPTQ
from jaxrunner.quantization.mxfp4 import Mxfp4
from jaxrunner.quantization.per_channel import OF_NAME, PerChannel
from jaxrunner.quantization.quantized_config import Method

KEY = "quantization_config"
OLD_KEY = "compression_config"  # of early compressed-tensors
FORMATS: dict[str, Callable[[Settings], Method]] = {
    "awq": AWQ.read,
    "compressed-tensors": CompressedTensors.read,
    "fp8": Fp8.read,
    "gptq": GPTQ.read,
    "mxfp4": Mxfp4.read,
}


def read_method(
    values: Mapping[str, Any], source: str, asked: str | None
) -> tuple[dict[str, Any], Method | None]:
    """Returns config.json without what it says of quantisation, and that; None for float weights.

    asked: `LLM(quantization=...)`: the checkpoint's format, or what its float weights become.

    Raises:
      ValueError: a format or a setting that is not supported; names it, and those that are.
    """
    rest = dict(values)
    found = [rest.pop(key, None) for key in (KEY, OLD_KEY)]
    told = next((value for value in found if value), None)
    if told is None:
        if asked is None:
            return rest, None
        if asked not in OF_NAME:
            raise ValueError(
                f"quantization must be one of {sorted(OF_NAME)} for a checkpoint of float weights, "
                f"got {shown(asked)}: {source} has no {KEY}"
            )
        return rest, PerChannel(asked)
    method = told.get("quant_method") if isinstance(told, dict) else None
    if method not in FORMATS:
        raise ValueError(
            f"{source}: {KEY} must have a quant_method among {sorted(FORMATS)}, got "
            f"{shown(method)}: take a checkpoint in one of these, or in bfloat16"
        )
    if asked not in (None, method):
        raise ValueError(
            f"quantization={asked!r} is not what {source} says its weights are, {method!r}: leave "
            "it out, or take a checkpoint of float weights"
        )
    settings = Settings(told, source, KEY)
    settings.expect("quant_method", method)
    try:
        return rest, FORMATS[method](settings)
    except ValueError as error:
        if settings.source in str(error):
            raise
        raise ValueError(f"{settings.source}: {error}") from error
