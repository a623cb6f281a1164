"""Bad words that are texts, as the token ids that an engine bans."""

from dataclasses import replace
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.text.tokenizer import Tokenizer


def encode_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Returns parameters whose bad words are token ids: of the word alone, and after a space.

    Raises:
      ValueError: a word is a text, and there is no tokenizer.
    """
    texts = [word for word in params.bad_words or () if isinstance(word, str)]
    if not texts:
        return params
    if tokenizer is None:
        raise ValueError(
            f"bad_words has the text {texts[0]!r} and there is no tokenizer: give token ids"
        )
    words: list[Any] = []
    for word in params.bad_words or ():
        if not isinstance(word, str):
            words.append(word)
            continue
        bare = word.lstrip()
        for form in (bare, f" {bare}") if bare else (word,):  # as vLLM
            words.append(tokenizer.encode(form, add_special_tokens=False))
    return replace(params, bad_words=[word for word in words if len(word)])
