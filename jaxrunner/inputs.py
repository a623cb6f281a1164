"""The dicts that prompts may be, for annotations. Knows no JAX."""

from collections.abc import Sequence
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str | None]  # it shares cached blocks only with prompts of the same


class TokensPrompt(TypedDict):
    """A prompt as token ids, perhaps with the text that they stand for."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


PromptType = str | TextPrompt | TokensPrompt
