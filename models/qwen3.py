"""Qwen3: Llama with a norm on each query and key. arXiv:2505.09388."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import llama
from jaxrunner.models.qwen2 import read_windows


def read(settings: Settings) -> DecoderConfig:
    """Reads a Qwen3 config."""
    bias = settings.take("attention_bias", bool, False)
    flags = dict(qkv_bias=bias, o_bias=bias, qk_norm=True, windows=read_windows(settings))
    return read_decoder(settings, head_dim=128, **flags)


qwen3 = llama._replace(read=read)
