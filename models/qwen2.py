"""Qwen2 and Qwen2.5: Llama with biased query, key and value. arXiv:2407.10671."""

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import llama, read_decoder


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
    default = [f"{'sliding' if i >= first else 'full'}_attention" for i in range(layers)]
    kinds = settings.each("layer_types", str, default)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for {layers} layers, "
            f"got {shown(kinds)}"
        )
    used = used and window > 0
    return tuple(window if used and kind == "sliding_attention" else None for kind in kinds)


qwen2 = llama._replace(read=read)
