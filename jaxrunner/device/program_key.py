"""The key of a compiled program, and its text. Knows no JAX."""

from typing import Any, NamedTuple

WORDS = dict(num_rows="requests", num_targets="prompt tokens")  # of fields of sizes


class Key(NamedTuple):
    """Names a program: a function, and the static size it is compiled for."""

    name: str
    size: Any  # hashable; a NamedTuple such as `Bucket`

    def __str__(self) -> str:
        """Says the sizes in words: "step, 512 tokens, 8 requests"."""
        return ", ".join([self.name, *_words(self.size)])


def _words(size: Any) -> list[str]:
    """Returns the fields of a size that are not 0 or False, in words."""
    words = []
    for name, value in size._asdict().items() if hasattr(size, "_asdict") else ():
        if hasattr(value, "_asdict"):
            words += _words(value)
        elif value is True:
            words.append(name.replace("_", " "))
        elif name.startswith("num_") and value:
            words.append(f"{value} {WORDS.get(name, name.removeprefix('num_').replace('_', ' '))}")
    return words
