"""Qwen2 and Qwen2.5: Llama with biased query, key and value. arXiv:2407.10671."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import llama
from jaxrunner.models.windows import layer_windows


def read(settings: Settings) -> DecoderConfig:
    """Reads a Qwen2 config."""
    return read_decoder(settings, qkv_bias=True, windows=read_windows(settings))


def read_windows(settings: Settings) -> tuple[int | None, ...]:
    """Returns each layer's window: listed in `layer_types`, or from `max_window_layers` on."""
    layers = settings.size("num_hidden_layers")
    used = settings.take("use_sliding_window", bool, False)
    absent = 0 if "sliding_window" in settings else 4096
    window = settings.size("sliding_window", absent, least=0)
    first = settings.take("max_window_layers", int, 28)
    return layer_windows(settings, window if used else 0, [i >= first for i in range(layers)])


qwen2 = llama._replace(read=read)
