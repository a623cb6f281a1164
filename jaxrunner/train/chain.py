"""Attention of drafts, for training: chains that leave a text after each of its tokens, at once.

Step 0 is the text itself. In step i the token at place t of an array is the i-th behind token t of
the text, and sees the text up to t and its own chain alone: of later steps, the same place.
"""

from dataclasses import replace
import functools

import jax
import jax.numpy as jnp

from jaxrunner.kernels_pallas import reference
from jaxrunner.model import AttentionSpec, Ops, RopeAndNorm
from jaxrunner.ops.backends import dense
from jaxrunner.ops.plain import split_heads
from jaxrunner.types import Array

Kept = tuple[tuple[Array, Array], ...]  # keys and values, [T, K, D], of each step so far


def chained(batch_size: int) -> Ops:
    """Returns operations of `batch_size` equal texts side by side; a layer's cache is `Kept`."""
    attend = functools.partial(_attend, batch_size)

    def rotate_attend(
        qkv: Array, heads: RopeAndNorm, kept: Kept | None, spec: AttentionSpec
    ) -> tuple[Array, Kept]:
        return attend(*split_heads(qkv, heads), kept, spec)

    return replace(dense(batch_size), attend=attend, rotate_attend=rotate_attend)


def _attend(
    batch_size: int, q: Array, k: Array, v: Array, kept: Kept | None, spec: AttentionSpec
) -> tuple[Array, Kept]:
    """Attends q, [T, H, D], to the text and to the chains so far; k and v, [T, K, D], join them."""
    kept = (*(kept or ()), (k, v))
    if len(kept) == 1:
        return reference.dense_attention(batch_size, q, k, v, None, spec)[0], kept
    (T, H, D), K, precision = q.shape, k.shape[1], None
    if q.dtype == jnp.float32:
        precision = jax.lax.Precision.HIGHEST
    einsum = functools.partial(jnp.einsum, precision=precision)
    q_BLKGD = q.reshape(batch_size, -1, K, H // K, D)
    (k_BSKD, v_BSKD), *chain = [
        tuple(x.reshape(batch_size, -1, K, D) for x in pair) for pair in kept
    ]
    text_BKGLS = einsum("blkgd,bskd->bkgls", q_BLKGD, k_BSKD)
    own = [einsum("blkgd,blkd->bkgl", q_BLKGD, k)[..., None] for k, _ in chain]
    place = jnp.arange(T // batch_size)
    seen_LS = place[:, None] >= place[None]
    seen_LS &= spec.sees(place[:, None] + len(chain), place[None])
    scores = jnp.concatenate([text_BKGLS, *own], -1).astype(jnp.float32) * spec.scale
    seen = jnp.concatenate([seen_LS, jnp.ones((len(place), len(chain)), jnp.bool)], -1)
    p = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf), -1).astype(q.dtype)
    out = einsum("bkgls,bskd->blkgd", p[..., : len(place)], v_BSKD)
    for i, (_, v) in enumerate(chain, len(place)):
        out += einsum("bkgl,blkd->blkgd", p[..., i], v)
    return out.reshape(T, H, D), kept
