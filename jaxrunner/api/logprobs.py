"""Logprobs as a user reads them: one entry, and many without an object for each. Knows no JAX."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload


class Logprob(NamedTuple):
    """How likely a token was, in nats; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """The logprobs of `flat_logprobs=True`: six lists that grow, however long a text is.

    Position i has the entries `start_indices[i]` to `end_indices[i]` of the other lists. Read like
    a list, it makes the dict of a position when asked, {} where there is none.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, entry: Mapping[int, Logprob] | None) -> None:
        """Adds a position."""
        entry = entry or {}
        self.append_fast(entry, *(zip(*entry.values(), strict=True) if entry else ((), (), ())))

    def append_fast(
        self,
        token_ids: Iterable[int],
        logprobs: Iterable[float],
        ranks: Iterable[int | None],
        decoded_tokens: Iterable[str | None],
    ) -> None:
        """Adds a position, without a dict in between."""
        self.start_indices.append(len(self.token_ids))
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.ranks += ranks
        self.decoded_tokens += decoded_tokens
        self.end_indices.append(len(self.token_ids))

    def extend(self, entries: Iterable[Mapping[int, Logprob] | None]) -> None:
        """Adds positions."""
        for entry in entries:
            self.append(entry)

    def __iadd__(self, entries: Iterable[Mapping[int, Logprob] | None]) -> "FlatLogprobs":
        self.extend(entries)
        return self

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> "FlatLogprobs": ...

    def __getitem__(self, index: int | slice) -> "dict[int, Logprob] | FlatLogprobs":
        if isinstance(index, slice):
            part = FlatLogprobs()
            part.extend(self[i] for i in range(len(self))[index])
            return part
        first, end = self.start_indices[index], self.end_indices[index]
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(first, end)
        }

    def __iter__(self) -> Iterator[dict[int, Logprob]]:
        return (self[i] for i in range(len(self)))
