"""A Llama that tells the hidden state of each request's last token, as embedding models do."""

import jax.numpy as jnp

from jaxrunner.heads.head import Head
from jaxrunner.models.decoder_config import DecoderConfig
from jaxrunner.models.llama import Params, llama
from jaxrunner.types import Array, Batch


def run(config: DecoderConfig, params: Params, hidden: Array, batch: Batch) -> Array:
    """Returns the embeddings, [B, E]."""
    return hidden[batch.logits_indices[:, 0]].astype(jnp.float32)


pooled = llama._replace(heads=(Head("embedding", "B E", run),))
