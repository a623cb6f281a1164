"""Bad words that are texts, as the token ids that an engine bans."""

from dataclasses import replace
from typing import Any

from jaxrunner.params import SamplingParams
from jaxrunner.tokenizer import Tokenizer


def encode_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Returns parameters whose bad words are token ids: of the word alone, and after a space."""
    texts = [word for word in params.bad_words or () if isinstance(word, str)]
    if not texts:
        return params
    if tokenizer is None:
        raise ValueError(
            f"bad_words has the text {texts[0]!r} and there is no tokenizer: give token ids"
        )
    words: list[Any] = []
    for word in params.bad_words or ():
        bare = word.lstrip() if isinstance(word, str) else ""
        forms = (bare, f" {bare}") if bare else (word,) * isinstance(word, str)  # as vLLM
        words += [tokenizer.encode(form, add_special_tokens=False) for form in forms] or [word]
    return replace(params, bad_words=[word for word in words if len(word)])
