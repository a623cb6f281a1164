"""Sizes of a small `LLM` of the embedded model, which compile little; what lives on the device."""

import gc
from typing import Any

import jax

SIZES: dict[str, Any] = dict(
    max_model_len=64, max_num_seqs=2, max_num_batched_tokens=32, token_buckets=(32,),
    decode_buckets=(2,), num_blocks=16, block_size=16, dtype="float32", use_tqdm=False,
    warm_up=False, cache_dir=None,
)  # fmt: skip


def live_bytes() -> int:
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())
