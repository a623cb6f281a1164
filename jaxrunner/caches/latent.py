"""Latents of all tokens, for layers whose heads make their keys and values of one small vector.

Multi-head latent attention, arXiv:2405.04434.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp

from jaxrunner.caches.full import FullAttention
from jaxrunner.pytree import leaf, pytree
from jaxrunner.types import Array


@pytree
class LatentCache:
    """Paged latents of one layer. D is what is kept of a token: the latent that all heads share,
    and behind it a key that is rotated.

    Those of 8 bits are multiples of a scale, one for each token. Every device of a mesh has S
    tokens of a block: all of them, unless they are dealt out.
    """

    latents: Array = leaf("N block_tokens D", "kv")
    scale: Array | None = leaf("N block_tokens", jnp.float32, when="scaled")


@dataclass(frozen=True, kw_only=True)
class LatentAttention(FullAttention):
    """Each token sees all before it; one vector a token stands for keys and values of all heads."""

    leaves: ClassVar[type] = LatentCache

    @classmethod
    def of(cls, num_dims: int) -> "LatentAttention":
        """Returns the kind of layers that keep so many numbers of a token, as one KV head does."""
        return cls(axes=(("K", 1), ("D", num_dims)))
