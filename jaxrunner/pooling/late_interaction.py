"""Queries that are pooled once and compared with documents of later calls, in vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.heads.late_interaction import QueryCache, max_sim, query_of

CACHE_QUERY, SCORE_DOC = "cache_query", "score_doc"
BOUNDS = {
    "mode": Bound(str, among=(CACHE_QUERY, SCORE_DOC)),
    "query_key": Bound(str),
    "query_uses": Bound(int, 1, 2**30, optional=True),
}


@dataclass(frozen=True, kw_only=True)
class LateInteractionParams:
    """The role of a prompt of a model for `token_embed` in a comparison of tokens.

    Raises:
      TypeError, ValueError: a field is wrong; names it.
    """

    mode: str  # "cache_query" keeps it, and tells 0; "score_doc" tells its MaxSim with one kept
    query_key: str
    query_uses: int | None = None  # of "cache_query": documents that will be scored; 1 by default

    def __post_init__(self):
        for name, bound in BOUNDS.items():
            validate(name, getattr(self, name), bound)
        if self.mode == SCORE_DOC and self.query_uses is not None:
            raise ValueError(
                f"query_uses={self.query_uses} is of mode='cache_query', this is a document: "
                "leave it out"
            )


def check(cache: QueryCache, asked: Sequence[LateInteractionParams | None], task: str) -> None:
    """Checks that each document's query will be kept when it is its turn.

    Raises:
      ValueError: it will not, or the model returns no arrays of tokens.
    """
    left: dict[str, int] = {}
    for one in asked:
        if one is None:
            continue
        if task != "token_embed":
            raise ValueError(
                f"late_interaction_params are of models for token_embed, this one is for {task}: "
                "leave them out"
            )
        key = one.query_key
        if one.mode == CACHE_QUERY:
            left[key] = one.query_uses or 1
            continue
        if not (uses := left.get(key, cache.uses(key))):
            raise ValueError(
                f"query_key={shown(key)} is of no query that is kept, or its uses are spent: pool "
                "it with mode='cache_query' first, with query_uses for all of its documents"
            )
        left[key] = uses - 1


def compare(
    cache: QueryCache, arrays: Sequence[np.ndarray], asked: Sequence[LateInteractionParams | None]
) -> list[np.ndarray]:
    """Returns the result of each prompt in place of its tokens' arrays: 0 of a query, [], that it
    keeps, and a document's score; others' arrays as they are."""
    told, queries, documents = list(arrays), [], []
    for i, (array, one) in enumerate(zip(arrays, asked, strict=True)):
        if one is not None and one.mode == CACHE_QUERY:
            cache.put(one.query_key, query_of(array), one.query_uses or 1)
            told[i] = np.zeros((), np.float32)
        elif one is not None:
            documents.append(i)
            queries.append(cache.query(one.query_key))
            cache.release(one.query_key)
    for i, score in zip(documents, max_sim(queries, [arrays[i] for i in documents]), strict=True):
        told[i] = np.asarray(score, np.float32)
    return told


def release(cache: QueryCache, asked: Sequence[Any]) -> None:
    """Counts a use of its query for each document that will not be compared."""
    for one in asked:
        if one is not None and one.mode == SCORE_DOC:
            cache.release(one.query_key)
