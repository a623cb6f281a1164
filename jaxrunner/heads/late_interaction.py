"""Late interaction: texts are compared token by token, after each was read alone.

arXiv:2004.12832. A query's arrays go to the device once, for all of its documents.
"""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.types import Array

MOST_PAIRS, MOST_SCORES = 64, 64_000_000  # of one launch, as in vLLM
SHORTEST = 16  # tokens that arrays are padded to, and powers of two above


class QueryCache:
    """Queries that are kept from call to call, by key, each with the uses that it has left."""

    def __init__(self):
        self._kept: dict[str, tuple[Array, int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, key: str, query: Array, uses: int) -> None:
        """Keeps a query for so many uses, in place of what had its key."""
        self._kept[key] = query, uses

    def uses(self, key: str) -> int:
        """Returns the uses that a query has left, 0 of one that is not kept."""
        return self._kept[key][1] if key in self._kept else 0

    def query(self, key: str) -> Array:
        """Returns a query that is kept; its uses are counted by `release`."""
        return self._kept[key][0]

    def release(self, key: str) -> None:
        """Counts a use; a query without any left is forgotten."""
        if key in self._kept:
            query, uses = self._kept.pop(key)
            if uses > 1:
                self._kept[key] = query, uses - 1


def query_of(tokens: np.ndarray) -> Array:
    """Returns a query of its tokens' arrays, [n, X], on the device, padded: [Q, X]."""
    return jnp.asarray(_padded(tokens, _size(len(tokens))))


def max_sim(queries: Sequence[Array], documents: Sequence[np.ndarray]) -> list[float]:
    """Returns the score of each pair of a query and a document, [m, X].

    It is the sum over the query's tokens of the largest product with one of the document's.
    """
    scores = [0.0] * len(queries)
    lens = [(q.shape[0], len(d)) for q, d in zip(queries, documents, strict=True)]
    for pairs in _batches(lens):
        M, B = _size(max(len(documents[i]) for i in pairs)), _size(len(pairs), 1)
        pairs_B = [*pairs, *pairs[:1] * (B - len(pairs))]
        told = _max_sim(
            jnp.stack([queries[i] for i in pairs_B]),
            np.stack([_padded(documents[i], M) for i in pairs_B]),
            np.array([len(documents[i]) for i in pairs_B], np.int32),
        )
        for i, score in zip(pairs, np.asarray(told).tolist(), strict=False):
            scores[i] = score
    return scores


@jax.jit
def _max_sim(q_BQX: Array, d_BMX: Array, d_len_B: Array) -> Array:
    products = jnp.einsum("bqx,bmx->bqm", q_BQX, d_BMX, precision=jax.lax.Precision.HIGHEST)
    is_in_BM = jnp.arange(d_BMX.shape[1])[None] < d_len_B[:, None]
    # The padding of a query is zeros, whose best product adds none.
    return jnp.where(is_in_BM[:, None], products, -jnp.inf).max(-1).sum(-1)


def _batches(lens: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Yields the pairs of each launch, those of like sizes together.

    lens: padded tokens of each pair's query, tokens of its document.
    """
    batch: list[int] = []
    for i in sorted(range(len(lens)), key=lambda i: lens[i]):
        Q, M = lens[i]
        alike = batch and lens[batch[0]][0] == Q
        fits = _size(len(batch) + 1, 1) * Q * _size(M) <= MOST_SCORES and len(batch) < MOST_PAIRS
        if batch and not (alike and fits):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _size(num: int, least: int = SHORTEST) -> int:
    return max(least, 1 << (num - 1).bit_length())


def _padded(tokens: np.ndarray, num: int) -> np.ndarray:
    return np.pad(tokens.astype(np.float32), ((0, num - len(tokens)), (0, 0)))
