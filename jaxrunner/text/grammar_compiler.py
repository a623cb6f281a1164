"""Grammars of structured outputs: compiled off the engine's thread, then one matcher a request.

llguidance (MIT) does the matching; it is imported when a compiler is made. Knows no JAX.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import threading
from typing import Any, NamedTuple
import weakref

import numpy as np

from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.text import grammar_trial
from jaxrunner.text.grammar_source import grammar_source
from jaxrunner.text.grammar_trial import Setup, Trial, deep_stacks, one_line
from jaxrunner.text.tokenizer import Tokenizer


class Vocabulary(NamedTuple):
    """The ids that a mask may allow. text, ends: [W], int32."""

    text: np.ndarray
    ends: np.ndarray
    eos_token_ids: frozenset[int]

    def has_text(self, token_id: int) -> bool:
        """Whether a grammar may use a token: one of the tokenizer's that is not special."""
        inside = 0 <= token_id < 32 * len(self.text)
        return inside and bool(self.text[token_id // 32] >> (token_id % 32) & 1)


class GrammarCompiler:
    """Compiles what requests ask for, each in a process first that may crash or be killed.

    vocab_size: the width V of the logits. Ids beyond the tokenizer's, and special tokens, are
    never allowed; each of `eos_token_ids` is where a grammar may end, and nowhere else.
    timeout_s and max_bytes bound one compilation; cache_size bounds the grammars kept.

    JSON may have between its tokens a line break with up to 32 characters of indentation, or one
    space: what people write, but bounded. `disable_any_whitespace` makes it compact, and
    `whitespace_pattern` is the request's own.

    Raises:
      ImportError: llguidance is not installed.
      ValueError: an EOS id is missing or beyond the logits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        timeout_s: float = 5.0,
        max_bytes: int = 2**29,
        cache_size: int = 64,
        num_threads: int = 2,
    ):
        grammar_trial.llguidance()
        self.vocabulary = _vocabulary(tokenizer, vocab_size, frozenset(eos_token_ids))
        ids = tokenizer.inner.get_vocab(with_added_tokens=True).values()
        self._setup = Setup(
            tokenizer=tokenizer.inner.to_str(),
            n_vocab=max(vocab_size, *(i + 1 for i in ids)),
            eos_token=min(self.vocabulary.eos_token_ids),
            timeout_s=timeout_s,
            max_bytes=max_bytes,
        )
        self._cache_size = cache_size
        self._cache: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._idle: list[Trial] = []
        self._close = weakref.finalize(self, _close, self._pool, self._idle)
        # Takes up to a second, and the first thread: a compilation waits for it.
        self._tokenizer = self._submit(grammar_trial.tokenizer, self._setup)

    def submit(self, params: StructuredOutputsParams) -> "Future[Grammar]":
        """Returns the future of a new `Grammar`; it fails with a ValueError of one line."""
        cached = self._cached(params)
        if cached is None:
            return self._submit(self._compile, params)
        future: Future[Grammar] = Future()
        future.set_result(cached)
        return future

    def close(self) -> None:
        """Ends the threads and processes, those of a compilation under way after it."""
        with self._lock:  # a trial is kept before, or not at all
            self._close()

    def __len__(self) -> int:
        """The grammars that are kept."""
        return len(self._cache)

    def _submit(self, function: Any, *args: Any) -> Future:
        """Hands work to the pool, whose threads start here."""
        with deep_stacks():
            return self._pool.submit(function, *args)

    def _cached(self, params: StructuredOutputsParams) -> "Grammar | None":
        with self._lock:
            found = self._cache.get(params)
            if found is None:
                return None
            self._cache.move_to_end(params)
            return found.copy()

    def _compile(self, params: StructuredOutputsParams) -> "Grammar":
        cached = self._cached(params)  # of a request that came just before
        if cached is not None:
            return cached
        try:
            tokens, source = self._tokenizer.result(), grammar_source(params)
            error = self._trial_error(source)
            matcher, error = (None, error) if error else grammar_trial.matcher(tokens, source)
        except (ValueError, OSError) as cause:
            matcher, error = None, one_line(str(cause))
        if error:
            raise ValueError(f"structured_outputs.{params.kind} cannot be used: {error}")
        with self._lock:
            kept = self._cache[params] = Grammar(matcher, self.vocabulary)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            return kept.copy()

    def _trial_error(self, source: str) -> str:
        """Returns why a process of its own could not compile the grammar."""
        with self._lock:
            idle = self._idle.pop() if self._idle else None
        trial = Trial(self._setup) if idle is None else idle
        error = trial.error(source)
        with self._lock:
            keeps = self._close.alive and not trial.died
            if keeps:
                self._idle.append(trial)
        if not keeps:
            trial.close()
        return error


class Grammar:
    """Where one request is in its grammar. Not for several threads at once."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary):
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.num_tokens = 0  # accepted, and not rolled back
        self.finished = False  # by EOS; nothing but EOS is allowed then, and nothing accepted

    @property
    def is_accepting(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why nothing more can be generated, in one line: the request has failed."""
        if self._matcher.is_error():
            return one_line(self._matcher.get_error())
        return None if self._mask().any() else "no token of the vocabulary continues the text"

    def fill(self, row: np.ndarray) -> None:
        """Writes which tokens may come next into row, [W] int32; EOS alone after an error.

        Bit t % 32 of word t // 32 is token t, and W = ceil(V / 32). Where the next text is certain
        that is one token, as the tokenizer writes it.
        """
        row[:] = self._mask()
        if not row.any():
            row[:] = self._vocabulary.ends

    def accept(self, token_ids: Iterable[int]) -> bool:
        """Advances by tokens up to one that is not allowed here, which changes nothing."""
        return all(self._accept(int(token_id)) for token_id in token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last tokens that were accepted, EOS included.

        Raises:
          ValueError: fewer were.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"num_tokens={num_tokens} to roll back, {self.num_tokens} were accepted: "
                "roll back at most these"
            )
        if num_tokens:
            self._matcher.rollback(num_tokens - self.finished)
            self.num_tokens -= num_tokens
            self.finished = False

    def fill_drafts(self, rows: np.ndarray, drafts: Sequence[int]) -> None:
        """Writes the masks of the drafted positions and the bonus one. rows: [J, W], J - 1 drafts.

        Row j takes the drafts before it as accepted. After a draft of -1, or one that is not
        allowed, rows repeat the last mask: whichever of them a sampler reads is constrained.

        Raises:
          ValueError: rows and drafts do not fit.
        """
        if len(rows) != len(drafts) + 1:
            raise ValueError(
                f"{len(rows)} rows for {len(drafts)} drafts: give one a draft and one more"
            )
        before = self.num_tokens
        self.fill(rows[0])
        follows = True
        for j, draft in enumerate(drafts):
            follows = follows and self._accept(int(draft))
            if follows:
                self.fill(rows[j + 1])
            else:
                rows[j + 1] = rows[j]
        if self.num_tokens > before:
            self.rollback(self.num_tokens - before)

    def copy(self) -> "Grammar":
        """Returns one that goes its own way from here."""
        copied = Grammar(self._matcher.deep_copy(), self._vocabulary)
        copied.num_tokens, copied.finished = self.num_tokens, self.finished
        return copied

    def _mask(self) -> np.ndarray:
        """Returns which tokens may come next, [W] int32: none where nothing continues the text."""
        text, ends, _ = self._vocabulary
        if self.finished:
            return ends
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(text)] & text
        return words | ends if self.is_accepting else words

    def _accept(self, token_id: int) -> bool:
        if self.finished or self._matcher.is_error():
            return False
        if token_id in self._vocabulary.eos_token_ids:
            # The matcher is not told: after some texts it takes no EOS though its mask has it.
            self.finished = self.is_accepting
            self.num_tokens += self.finished
            return self.finished
        # It would not recover from an id that it does not know.
        if not self._vocabulary.has_text(token_id):
            return False
        accepted = self._matcher.try_consume_tokens([token_id]) == 1
        self.num_tokens += accepted
        return accepted


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos: frozenset[int]) -> Vocabulary:
    if not eos or not all(0 <= i < vocab_size for i in eos):
        raise ValueError(
            f"eos_token_ids={sorted(eos)} must be one or more of the model's ids, "
            f"which end at {vocab_size - 1}: take those of its configuration"
        )
    known = set(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    text = known - tokenizer.special_ids - special - eos
    return Vocabulary(_words(text, vocab_size), _words(eos, vocab_size), eos)


def _words(ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Returns the mask of ids, [W] int32; those beyond the logits are left out."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[[i for i in ids if i < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _close(pool: ThreadPoolExecutor, idle: list[Trial]) -> None:
    # The last user of a compiler may be a thread of its own pool, so nobody waits here.
    pool.shutdown(wait=False, cancel_futures=True)
    while idle:
        idle.pop().close()
