"""Which implementation of attention an engine runs, and why not another."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas import decode_attention, paged_attention, reference


class Choice(NamedTuple):
    """An implementation, by its name in `EngineConfig.attention_backend`, and why it was taken."""

    name: str
    attention: Callable[..., Any]
    reason: str


def choose_attention(model: ModelConfig, engine: EngineConfig) -> Choice:
    """Returns what computes attention.

    Raises:
      ValueError: `attention_backend` names kernels that this model or device cannot use.
    """
    wanted = engine.attention_backend
    if wanted == "reference":
        return Choice("reference", reference.paged_attention, "it was asked for")
    reason = refuses(model, engine)
    if reason is None:
        return Choice("mosaic_gpu", paged_attention.paged_attention, "it serves this model")
    if wanted == "mosaic_gpu":
        raise ValueError(f"attention_backend='mosaic_gpu' {reason}: use 'auto' or 'reference'")
    return Choice("reference", reference.paged_attention, f"mosaic_gpu {reason}")


def refuses(model: ModelConfig, engine: EngineConfig) -> str | None:
    """Says why the kernels do not serve this model on this device; None if they do."""
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != "9.0":
        return f"wants a Hopper GPU (compute capability 9.0), got {device.device_kind}"
    H, K, D = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    q = jax.ShapeDtypeStruct((1, H, D), jnp.dtype(engine.dtype))
    kv = jax.ShapeDtypeStruct(
        (engine.num_blocks, K, engine.block_size, D), jnp.dtype(engine.kv_dtype)
    )
    return decode_attention.refuses(q, kv)
