"""Qwen3-MoE: Qwen3 with experts in most layers. arXiv:2505.09388."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.mixtures.mixture import MixtureConfig, mixture, read_mixture, read_router


def read(settings: Settings) -> MixtureConfig:
    """Reads a Qwen3-MoE config."""
    renormalised = settings.take("norm_topk_prob", bool, False)
    router = read_router(settings, "num_experts", "num_local_experts", norm_topk_prob=renormalised)
    bias = settings.take("attention_bias", bool, False)
    flags = dict(qkv_bias=bias, o_bias=bias, qk_norm=True, windows=_read_windows(settings))
    return read_mixture(settings, router, sparse=read_sparse(settings), head_dim=128, **flags)


def _read_windows(settings: Settings) -> tuple[int | None, ...]:
    """Returns the window of all layers, whatever `max_window_layers` is."""
    settings.take("max_window_layers", int, 0)
    absent = 0 if "sliding_window" in settings else 4096
    window = settings.size("sliding_window", absent, least=0)
    used = settings.take("use_sliding_window", bool, False)
    return (window or None if used else None,) * settings.size("num_hidden_layers")


def read_sparse(settings: Settings) -> tuple[bool, ...]:
    """Returns which layers have experts: `mlp_only_layers` have none, nor those between steps."""
    step, dense = settings.size("decoder_sparse_step", 1), settings.each("mlp_only_layers", int, [])
    layers = range(settings.size("num_hidden_layers"))
    return tuple(i not in dense and (i + 1) % step == 0 for i in layers)


qwen3_moe = mixture._replace(read=read)
