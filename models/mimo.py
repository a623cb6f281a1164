"""MiMo: Qwen2 whose checkpoints have layers that draft, too. arXiv:2505.07608."""

from dataclasses import dataclass

from jaxrunner.hf_config import Settings
from jaxrunner.models.decoder_config import DecoderConfig, read_decoder
from jaxrunner.models.llama import llama
from jaxrunner.models.qwen2 import read_windows

MTP = "model.mtp_layers."  # the prefix of their tensors


@dataclass(frozen=True)
class MimoConfig(DecoderConfig):
    """A Qwen2 config, and how many layers the checkpoint has that draft."""

    num_nextn_predict_layers: int = 0


def read(settings: Settings) -> MimoConfig:
    """Reads a MiMo config."""
    num_mtp = settings.size("num_nextn_predict_layers", 0, least=0)
    settings.expect("attention_bias", True)
    settings.expect("use_sliding_window", False)
    decoder = read_decoder(settings, qkv_bias=True, windows=read_windows(settings))
    return MimoConfig(**vars(decoder), num_nextn_predict_layers=num_mtp)


mimo = llama._replace(read=read, spare=(MTP,))  # `speculators/mimo_mtp.py` reads these
