"""Patterns of a tokenizer.json, tried on texts at which matching them backtracks most.

`tokenizers` matches by Oniguruma, which ends one attempt after ten million steps, and makes an
attempt at every character: `x*x*[yz]` takes the cube of a text's length, and Python cannot
interrupt it. What takes the square is let pass, as patterns of published models do that group
digits by threes. Knows no JAX.
"""

from collections.abc import Callable, Iterator
import itertools
import re
import time
from typing import Any

import tokenizers

from jaxrunner.api.limits import PATTERN_CHARS, PATTERN_TEXT, PATTERN_TIME_S
from jaxrunner.api.validation import shown
from jaxrunner.errors import of_foreign_code

# Characters that patterns distinguish: letters, digits, space, line ends, marks, scripts.
USUAL = ("a", "A", "0", " ", "\n", ".", "'", "\u0301", "\u4e2d")
MOST_UNITS = 24
SIGNS = r"\\[pP]\{.*?\}|\\x\{.*?\}|\\.|\{[\d,]*\}"  # letters in them are no literals
FIRST_TEXT = 64  # characters
TRIES = 3  # virtual machines count a pause as a thread's time, so the fastest run decides


def check(where: str, told: dict[str, Any], inner: tokenizers.Tokenizer) -> None:
    """Checks the patterns of a tokenizer: their length, and their time on repeated characters.

    where: says which file `told` is from; `inner` is made of it. Files without patterns cost
    nothing, others some milliseconds.

    Raises:
      ValueError: a pattern is too long, or takes too much time; names the section.
    """
    steps: dict[str, Callable[[str], Any] | None] = dict(
        normalizer=inner.normalizer and inner.normalizer.normalize_str,
        pre_tokenizer=inner.pre_tokenizer and inner.pre_tokenizer.pre_tokenize_str,
    )
    for name, run in steps.items():
        patterns = list(_patterns(told.get(name)))
        longest = max(patterns, key=len, default="")
        if len(longest) > PATTERN_CHARS:
            raise ValueError(
                f"{where}: {name} has a pattern of {len(longest)} characters, it may have "
                f"{PATTERN_CHARS}: fetch it again"
            )
        if patterns and run is not None:
            _try(f"{where}: {name}", patterns, run)


def _try(where: str, patterns: list[str], run: Callable[[str], Any]) -> None:
    """Runs a section on texts of one unit repeated, twice as often each time."""
    own = (unit for pattern in patterns for unit in _units(pattern))
    units = list(dict.fromkeys((*USUAL, *itertools.islice(own, MOST_UNITS))))
    # The end of a pattern has to be in the text, or no attempt is made.
    tail = "!" + "".join(units)
    length = FIRST_TEXT
    while length <= PATTERN_TEXT:
        for unit in units:
            text, reason = unit * (length // len(unit)) + tail, ""
            try:
                if all(_seconds(run, text) > PATTERN_TIME_S for _ in range(TRIES)):
                    reason = f"takes over {PATTERN_TIME_S} s"
            except BaseException as error:  # of Rust, whose panics are no Exceptions
                reason = f"fails ({of_foreign_code(error)!s:.200})"
            if reason:
                raise ValueError(
                    f"{where} {reason} for {shown(unit)} repeated to {length} characters, its "
                    "patterns backtrack: fetch it again, or write them without"
                )
        length *= 2


def _seconds(run: Callable[[str], Any], text: str) -> float:
    start = time.thread_time()
    run(text)
    return time.thread_time() - start


def _units(pattern: str) -> Iterator[str]:
    """Yields runs of literal characters, which a pattern may repeat, and each by itself."""
    for run in re.findall(r"[^\W_]+", re.sub(SIGNS, " ", pattern)):
        yield run[:FIRST_TEXT]
        yield from dict.fromkeys(run)


def _patterns(section: Any) -> Iterator[str]:
    """Yields the regular expressions in a section of the file."""
    parts = [section]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            regex = part.get("Regex")
            if isinstance(regex, str):
                yield regex
            parts += part.values()
        elif isinstance(part, list):
            parts += part
