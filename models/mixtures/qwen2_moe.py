"""Qwen2-MoE: Qwen2 with experts, and an MLP for all tokens beside them. arXiv:2407.10671."""

from jaxrunner.hf_config import Settings
from jaxrunner.models.mixtures.mixture import MixtureConfig, mixture, read_mixture, read_router
from jaxrunner.models.mixtures.qwen3_moe import read_sparse
from jaxrunner.models.windows import layer_windows


def read(settings: Settings) -> MixtureConfig:
    """Reads a Qwen2-MoE config."""
    renormalised = settings.take("norm_topk_prob", bool, False)
    router = read_router(settings, "num_experts", norm_topk_prob=renormalised)
    flags = dict(
        qkv_bias=settings.take("qkv_bias", bool, True),
        shared_expert_intermediate_size=settings.size("shared_expert_intermediate_size"),
        shared_expert_gate=True,
        windows=_read_windows(settings),
    )
    return read_mixture(settings, router, sparse=read_sparse(settings), **flags)


def _read_windows(settings: Settings) -> tuple[int | None, ...]:
    """Returns each layer's window; by default every second layer's, up to `max_window_layers`."""
    used = settings.take("use_sliding_window", bool, False)
    absent = 0 if "sliding_window" in settings else 4096
    window = settings.size("sliding_window", absent, least=0) if used else 0
    settings.take("sliding_window", int, 0)
    last = settings.take("max_window_layers", int, 28)
    layers = range(settings.size("num_hidden_layers"))
    return layer_windows(settings, window, [used and i % 2 == 0 and i < last for i in layers])


qwen2_moe = mixture._replace(read=read)
