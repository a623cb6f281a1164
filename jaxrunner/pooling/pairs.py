"""Pairs of texts: how they are read together. Knows no JAX."""

from collections.abc import Sequence
from typing import Any

from jaxrunner.api.validation import shown
from jaxrunner.text.tokenizer import Tokenizer

Texts = str | Sequence[str]


def read_pairs(data_1: Texts, data_2: Texts) -> list[tuple[str, str]]:
    """Returns the pairs of one text with each of several, or of two lists side by side.

    Raises:
      TypeError: one is neither a text nor a list of texts.
      ValueError: the lists are of unlike lengths.
    """
    first, second = (_texts(*x) for x in (("data_1", data_1), ("data_2", data_2)))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise ValueError(
            f"data_1 has {len(first)} texts and data_2 {len(second)}: give one, or as many"
        )
    return list(zip(first, second, strict=True))


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"{name} must be a text or a list of texts, got {shown(given)}")
    return [str.__str__(text) for text in texts]  # of a class of its user's, what it holds


def paired(
    tokenizer: Tokenizer | None, first: str, second: str, *, as_pair: bool
) -> tuple[dict[str, Any], int | None]:
    """Returns the prompt of two texts, and the tokens that belong to the first.

    as_pair: whether the tokenizer puts its separators between them, as encoders are trained; else
    one text follows the other at once.

    Raises:
      ValueError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("score reads texts, and skip_tokenizer_init=True leaves no tokenizer")
    if not as_pair:
        return {"prompt": first + second}, None
    ids, num_first = tokenizer.encode_pair(first, second)
    return {"prompt_token_ids": ids}, num_first
