"""Matches modules of a checkpoint with lists of names and patterns."""

from collections.abc import Sequence
import re

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import Settings

HEAD = "lm_head"
PATTERN = "re:"  # before a regular expression, that a name's beginning must match
LONGEST = 200  # characters of a pattern: a long one may take for ever


def read_names(settings: Settings, *keys: str) -> tuple[str, ...]:
    """Returns the names of modules that settings list under one of several keys.

    Raises:
      ValueError: a pattern that cannot be read.
    """
    names = tuple(name for key in keys for name in settings.each(key, str, []))
    for name in names:
        if name.startswith(PATTERN):
            pattern(name)
    return names


def pattern(name: str) -> re.Pattern[str]:
    """Returns the regular expression behind `re:`.

    Raises:
      ValueError: it is none, or too long.
    """
    text = name.removeprefix(PATTERN)
    try:
        if len(text) > LONGEST:
            raise ValueError(f"it has {len(text)} characters, {LONGEST} at most")
        return re.compile(text)
    except (re.error, ValueError) as error:
        raise ValueError(
            f"quantization_config must name modules by regular expressions, got {shown(name)}: "
            f"{error}"
        ) from error


def is_named(module: str, names: Sequence[str]) -> bool:
    """Whether a module, or one that it is part of, is among names and patterns.

    "self_attn" and "layers.0" are "model.layers.0.self_attn.q_proj"; "self" is not.
    """
    dotted = f".{module}."
    return any(
        pattern(name).match(module) is not None
        if name.startswith(PATTERN)
        else f".{name}." in dotted
        for name in names
    )
