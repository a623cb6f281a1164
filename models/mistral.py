"""Mistral: Llama with a sliding window. arXiv:2310.06825."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import llama


def read(settings: Settings) -> DecoderConfig:
    """Reads a Mistral config; a null `sliding_window` is full attention, an absent one 4096."""
    absent = 0 if "sliding_window" in settings else 4096
    window = settings.size("sliding_window", absent, least=0)
    layers = settings.size("num_hidden_layers")
    return read_decoder(settings, windows=(window or None,) * layers)


mistral = llama._replace(read=read)
