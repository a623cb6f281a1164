"""Text of tokens as they come, and the stop strings in it. Knows no JAX."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.text.tokenizer import BROKEN, Tokenizer

MAX_HALF = 3  # tokens that half a character takes at most: UTF-8 has up to 4 bytes
MAX_PENDING = 64  # tokens; text that ends broken for so long is shown as it is
CONTEXT = 8  # prompt tokens to decode with, if they are enough


class Detokenizer:
    """Decodes the output of one request as it grows.

    All deltas and the flush together are what the decoded output adds to the decoded prompt. One
    exception: once characters of byte tokens are shown, later bytes that break UTF-8 do not undo
    them, while a decoder that sees the whole at once writes U+FFFD for each byte of the run.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ):
        """spaces_between_special_tokens: whether a decoder may put a space between two tokens that
        were added to its vocabulary, as it does between words."""
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._joins = not (skip_special_tokens or spaces_between_special_tokens)
        self._ids = self._context(prompt_ids)
        # `_ids[:_read]` decodes to `_known` and is shown, `_ids[_read:]` in part: `_shown`.
        self._read = self._last_whole()
        self._known = self._decode(self._ids[: self._read])
        self._shown = self._pending()  # half a character of the prompt
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """The text that was returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, ids: Sequence[int]) -> str:
        """Takes in tokens. Returns the characters that are certain now."""
        # One by one: two characters at once would hide where the first one ends.
        return "".join([self._append(token_id) for token_id in ids])

    def flush(self) -> str:
        """Returns what was held back, complete or not."""
        return self._finish(self._pending())

    def _append(self, token_id: int) -> str:
        if self._joins and self._ids and {token_id, self._ids[-1]} <= self._tokenizer.added.keys():
            return self._join(int(token_id))
        text = self._tokenizer.whole_text(token_id)
        if text and self._read == len(self._ids) and not self._known.endswith(BROKEN):
            self._ids, self._read, self._known = [int(token_id)], 1, text
            self._parts.append(text)
            return text
        if not (visible := self._visible([token_id])):
            return ""
        self._ids += visible
        pending = self._pending()
        if pending.endswith(BROKEN) and len(self._ids) - self._read <= MAX_PENDING:
            return self._show(pending.rstrip(BROKEN))
        return self._finish(pending)

    def _join(self, token_id: int) -> str:
        """Takes in an added token that follows another one, whose text is shown as it is."""
        rest, text = self.flush(), self._tokenizer.added[token_id]
        self._ids, self._read = [token_id], 1
        self._known, self._shown = self._decode(self._ids), ""
        self._parts.append(text)
        return rest + text

    def _finish(self, pending: str) -> str:
        delta = self._show(pending)
        if pending:
            # The ids just decoded are the context that decides on the next token's space.
            self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
            self._known, self._shown = self._decode(self._ids), ""
        return delta

    def _show(self, text: str) -> str:
        """Returns what `text`, the certain part of `_pending`, adds to what is shown of it."""
        if len(text) <= len(self._shown) and self._shown.startswith(text):
            return ""
        # Half a character at a prompt's end, which is the end of `_shown`, may have become whole.
        while not text.startswith(self._shown):
            self._shown = self._shown[:-1]
        delta, self._shown = text[len(self._shown) :], text
        self._parts.append(delta)
        return delta

    def _pending(self) -> str:
        """Returns the text of the tokens that are not yet read for good."""
        text = self._decode(self._ids)
        if text.startswith(self._known):
            return text[len(self._known) :]
        return self._decode(self._ids[self._read :])  # bytes that broke the run before them

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Returns the end of a prompt, with text in it and whole characters at its start."""
        size = CONTEXT
        while True:
            ids = self._visible(prompt_ids[max(len(prompt_ids) - size, 0) :])
            text = self._decode(ids)
            if size >= len(prompt_ids) or (text.strip() and not text.startswith(BROKEN)):
                return ids
            size *= 4

    def _last_whole(self) -> int:
        """Returns how many of the first tokens end in a whole character."""
        for size in range(len(self._ids), max(len(self._ids) - MAX_HALF, 0), -1):
            if not self._decode(self._ids[:size]).endswith(BROKEN):
                return size
        return max(len(self._ids) - MAX_HALF, 0)

    def _visible(self, ids: Sequence[int]) -> list[int]:
        """Drops what decodes to nothing, so that no run of it hides the context."""
        hidden = self._tokenizer.special_ids if self._skip else ()
        return [int(i) for i in ids if i not in hidden and i in self._tokenizer]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.join(ids, self._skip)


class StopMatch(NamedTuple):
    """A stop string that occurred."""

    stop: str
    text: str  # cut as `include_stop_str_in_output` says


class StopChecker:
    """Finds a request's stop strings."""

    def __init__(self, params: SamplingParams):
        self._stops = tuple(params.stop or ())
        self._include, self._min_tokens = params.include_stop_str_in_output, params.min_tokens

    def find(self, text: str, num_new: int, num_tokens: int) -> StopMatch | None:
        """Returns the stop string that starts first in `text`, of those the first given.

        Only one that ends in the last `num_new` characters counts, and none before the output
        has more than `min_tokens` tokens; it has `num_tokens`.
        """
        if not self._stops or num_tokens <= self._min_tokens:
            return None
        found = []
        for order, stop in enumerate(self._stops):
            place = text.find(stop, max(len(text) - num_new - len(stop) + 1, 0))
            if place >= 0:
                found.append((place, order, stop))
        if not found:
            return None
        place, _, stop = min(found)
        return StopMatch(stop, text[: place + len(stop) * self._include])

    def num_held(self, text: str) -> int:
        """Returns how many of the last characters a stream must hold: they may begin a stop."""
        if self._include:
            return 0  # they are shown in any case
        held = 0
        for stop in self._stops:
            place = max(len(text) - len(stop) + 1, 0)
            while (place := text.find(stop[0], place)) >= 0 and not stop.startswith(text[place:]):
                place += 1
            held = max(held, len(text) - place if place >= 0 else 0)
        return held
