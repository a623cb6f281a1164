"""Reads what a user passes as prompts. An error is its own prompt's alone. Knows no JAX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
import numbers
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import NO_LIMIT
from jaxrunner.api.validation import check_unicode, shown
from jaxrunner.text.tokenizer import Tokenizer

KEYS = ("prompt", "prompt_token_ids")
SALT = "cache_salt"
FORMS = 'a str, {"prompt": str} or {"prompt_token_ids": [int, ...]}'


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as text, as token ids, or as the error that it is."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None  # it shares cached blocks only with prompts of the same
    error: TypeError | ValueError | None = None

    def resolve(
        self, tokenizer: Tokenizer | None, max_tokens: int | None = None
    ) -> tuple[str | None, list[int]]:
        """Returns the prompt's text, None where only ids were given, and its token ids.

        max_tokens: that there is room for; a text that cannot fit is not split.

        Raises:
          TypeError, ValueError: the prompt is bad, or is text and there is no tokenizer.
        """
        if self.error is not None:
            raise self.error
        if self.token_ids is not None:
            return self.text, self.token_ids
        if tokenizer is None:
            raise ValueError(
                "prompt is text and skip_tokenizer_init=True leaves no tokenizer: "
                "pass prompt_token_ids"
            )
        return self.text, tokenizer.encode(self.text or "", max_tokens=max_tokens)


def parse_prompts(prompts: Any) -> list[ParsedPrompt]:
    """Returns one prompt, or each of a list, parsed; a bad one of a list carries its error.

    Raises:
      TypeError: `prompts` as a whole is neither.
    """
    if isinstance(prompts, str | dict):
        return [_parse(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise TypeError(f"prompts must be {FORMS}, or a list of them, {_got(prompts)}")
    if prompts and all(_is_integer(item) for item in prompts):
        raise TypeError(
            "prompts is a list of integers, which may be one prompt or many: "
            'for one pass {"prompt_token_ids": [...]}'
        )
    return [_parse(prompt) for prompt in prompts]


def check_prompt(
    token_ids: Sequence[int], vocab_size: int, max_model_len: int, *, most: int = NO_LIMIT
) -> list[int]:
    """Returns the last tokens of a prompt, `most` of them, if a model can take it and add a token.

    Raises:
      TypeError: it is no list of integers.
      ValueError: it is empty, too long, or has an id beyond the logits' width.
    """
    _check_list(token_ids)
    token_ids = token_ids if len(token_ids) <= most else token_ids[-most:]
    _check_length(len(token_ids), max_model_len)  # before a long one is copied
    ids = _integers(token_ids)
    _check_length(len(ids), max_model_len)
    if min(ids) < 0 or max(ids) >= vocab_size:
        i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise ValueError(
            f"prompt_token_ids[{i}]={shown(ids[i])} is out of range, the model's ids are 0 "
            f"to {vocab_size - 1}: encode with the model's own tokenizer"
        )
    return ids


def _check_length(length: int, max_model_len: int) -> None:
    if length < 1:
        raise ValueError("prompt has 0 tokens, a model needs 1 to go on from: pass some text")
    if length >= max_model_len:
        raise ValueError(
            f"prompt has {length} tokens, max_model_len={max_model_len} leaves room for "
            f"{max_model_len - 1}: shorten it or raise max_model_len"
        )


def _check_list(ids: Any) -> None:
    no_list = isinstance(ids, str | bytes | bytearray | dict)
    no_list |= isinstance(ids, np.ndarray) and ids.ndim == 0
    if no_list or not isinstance(ids, Sequence | np.ndarray):
        raise TypeError(f"prompt_token_ids must be a list of integers, {_got(ids)}")


def _parse(prompt: Any) -> ParsedPrompt:
    try:
        return _parse_dict({"prompt": prompt} if isinstance(prompt, str) else prompt)
    except (TypeError, ValueError) as error:
        return ParsedPrompt(error=error)


def _parse_dict(prompt: Any) -> ParsedPrompt:
    """Reads a text, ids, or ids with the text they stand for."""
    if not isinstance(prompt, dict):
        raise TypeError(f"a prompt must be {FORMS}, {_got(prompt)}")
    if unknown := [key for key in prompt if key not in (*KEYS, SALT)]:
        raise ValueError(
            f"prompt has unknown keys {shown(unknown)}: use {' or '.join(KEYS)}, and {SALT}"
        )
    given = {key: value for key, value in prompt.items() if value is not None}
    salt = given.pop(SALT, None)
    if not given:
        raise ValueError(f"prompt is a dict without a prompt: set {' or '.join(KEYS)}")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"prompt must be a str, {_got(text)}")
    check_unicode("prompt", text or "")
    if ids is not None:
        _check_list(ids)
    if salt is not None and not (isinstance(salt, str) and salt):
        raise TypeError(f"cache_salt of a prompt must be a text that is not empty, {_got(salt)}")
    check_unicode("cache_salt of a prompt", salt or "")
    return ParsedPrompt(text, None if ids is None else _integers(ids), salt)


def _integers(values: Iterable[Any]) -> list[int]:
    """Returns ids as plain integers."""
    values = list(values)
    if set(map(type, values)) <= {int}:
        return values  # at once: prompts are long
    for i, value in enumerate(values):
        if not _is_integer(value):
            raise TypeError(f"prompt_token_ids[{i}] must be an integer, {_got(value)}")
    return [int(value) for value in values]


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool | np.timedelta64)


def _got(value: Any) -> str:
    return f"got {shown(value)} of {type(value).__name__}"
