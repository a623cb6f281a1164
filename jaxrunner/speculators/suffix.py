"""Suffix decoding: drafts the tokens that followed the longest earlier match of a request's suffix.

arXiv:2411.04975. Matches are searched in the request itself and in a corpus, a ring of outputs of
ended requests on the device. There is no suffix tree: all positions are compared at once. The
longest match counts; of equally long ones a match in the request counts before one in the corpus,
and the latest first. The latest is nearest to the current text, and takes one maximum, where the
most frequent continuation would take a count of each token. Drafting stops where too small a share
of the matches continues with the same token.

A step of B rows compares B (L + G) tokens with up to `max_depth` others, in passes that a compiler
fuses, and reads 4 B L + 4 G bytes, for L tokens of a request and G of the corpus: with B = 64,
L = 4096, G = 65536 and a depth of 24 about 10^8 comparisons and 1.3 MB.
"""

import functools

import jax.numpy as jnp
import numpy as np

from jaxrunner.api.lookups import MAX_CORPUS, MAX_DEPTH
from jaxrunner.api.speculative_config import MAX_DRAFTS
from jaxrunner.api.validation import Bound, validate
from jaxrunner.indexing import take
from jaxrunner.pytree import host_value, leaf, pytree
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.slot_table import SlotTable
from jaxrunner.speculators.speculator import DraftInputs, Proposal, Speculator, with_sizes
from jaxrunner.types import Array, Requests, SamplingMetadata


@pytree
class Corpus:
    """A ring of ended requests' tokens, and flags of requests that neither read nor extend it."""

    tokens: Array = leaf("ring")  # each one's id + 1; 0 behind each request, and at first
    end: Array = leaf("one")  # where the next one goes
    is_private: Array = leaf("R", jnp.bool)


def suffix(
    num_drafts: int,
    *,
    max_depth: int = 24,
    num_cached: int = 65536,
    max_factor: float = 1.0,
    min_share: float = 0.1,
) -> Speculator:
    """Returns a speculator that drafts by suffixes, at most `max_factor` tokens for each matched.

    max_depth: most tokens of a match and its drafts together. num_cached: tokens of ended requests
    that are kept, 0 for none. min_share: the least share of matches that continue with a draft's
    token. Needs no weights. Requests with a cache salt neither read nor extend the corpus.

    Raises:
      TypeError, ValueError: a number is of the wrong type or out of range; names it.
    """
    validate("num_drafts", num_drafts, Bound(int, 1, MAX_DRAFTS))
    validate("num_cached", num_cached, Bound(int, 0, MAX_CORPUS))
    validate("max_depth", max_depth, Bound(int, 2, MAX_DEPTH))
    if max_depth <= num_drafts:
        raise ValueError(
            f"max_depth={max_depth} holds {num_drafts} drafts and no token that they follow: "
            "raise it"
        )
    sizes = dict(num_drafts=num_drafts, max_len=max_depth - num_drafts)
    bounds = dict(max_factor=float(max_factor), min_share=float(min_share))
    dims = ("ring", num_cached), ("one", 1)
    table = SlotTable("suffix", Corpus, _row, dims=dims, shared=("ring", "one"))
    propose = with_sizes(_propose, **sizes, **bounds)
    return Speculator("suffix", num_drafts, propose, tables=(table,))


def _row(request: NewRequest) -> Corpus:
    none = np.zeros(0, np.int32)
    return host_value(Corpus, tokens=none, end=none, is_private=np.bool_(request.cache_salt))


def _propose(sizes: dict, inputs: DraftInputs) -> Proposal:
    requests, slot, corpus = inputs.requests, inputs.rows.slot, inputs.tables["suffix"]
    ids, total = take(requests.token_ids, slot), take(requests.total_len, slot)
    own = jnp.where(jnp.arange(ids.shape[1])[None] < total[:, None], ids + 1, 0)
    reads = ~take(corpus.is_private, slot)
    drafts = lookup(own, total, corpus, reads, **sizes)
    if corpus.tokens.size == 0:
        return Proposal(drafts)
    corpus = remember(corpus, requests, inputs.rows, own, max_len=sizes["max_len"])
    return Proposal(drafts, inputs.tables | {"suffix": corpus})


def remember(
    corpus: Corpus, requests: Requests, rows: SamplingMetadata, own: Array, *, max_len: int
) -> Corpus:
    """Returns the corpus with the outputs of the rows that end in this step.

    Up to `max_len` tokens of the prompt come before an output, so that its first tokens match too.
    own: [B, L], their tokens as the corpus has them.
    """
    G, slot = corpus.tokens.size, rows.slot
    ends = rows.samples & take(requests.done, slot) & ~take(corpus.is_private, slot)
    first = jnp.maximum(take(requests.prompt_len, slot) - max_len, 0)
    num = jnp.where(ends, take(requests.total_len, slot) + 1 - first, 0)
    end = corpus.end + jnp.cumsum(num, dtype=jnp.int32)  # as if the ring were a line
    tokens = jnp.pad(own, ((0, 0), (0, 1)))  # a 0 behind the last one
    k = jnp.arange(tokens.shape[1])[None] - first[:, None]
    place = (end - num)[:, None] + k
    is_kept = (k >= 0) & (k < num[:, None]) & (place >= end[-1] - G)
    place = jnp.where(is_kept, place % G, G)
    written = corpus.tokens.at[place].set(tokens, mode="drop")
    return Corpus(written, end[-1:] % G, corpus.is_private)


def lookup(
    own: Array, total: Array, corpus: Corpus, reads: Array, *,
    num_drafts: int, max_len: int, max_factor: float, min_share: float,
) -> Array:  # fmt: skip
    """Returns drafts, [B, K], -1 where there is none.

    own: [B, L], ids + 1 of a request's tokens, 0 behind the first `total`, [B]. reads: [B], whether
    a row reads the corpus. max_len: most tokens of a match. The continuation of a match that
    reaches the end of the tokens goes on with the drafts.
    """
    (B, L), K, G = own.shape, num_drafts, corpus.tokens.size
    i, j = jnp.arange(max_len)[None], jnp.arange(K)[None]
    last = jnp.take_along_axis(own, jnp.maximum(total[:, None] - 1 - i, 0), 1)
    last = jnp.where(i < total[:, None], last, -1)  # which equals no token
    text = jnp.pad(own, ((0, 0), (max_len, K)))
    length, at = _longest(text, last, jnp.arange(L)[None], K)
    period = jnp.maximum(total - 1 - at, 1)[:, None]
    tokens = jnp.take_along_axis(own, jnp.minimum(at[:, None] + 1 + j % period, L - 1), 1)
    texts, seen = [text], [jnp.ones(B, jnp.bool)]
    if G:
        around = (jnp.arange(max_len + G + K) - max_len) % G
        text = corpus.tokens[around][None]
        age = (jnp.arange(G) - corpus.end) % G
        other, age = _longest(text, last, age[None], K)
        other = jnp.where(reads, other, 0)
        at = (age + corpus.end)[:, None] + 1 + j
        tokens = jnp.where((other > length)[:, None], corpus.tokens[at % G], tokens)
        length = jnp.maximum(length, other)
        texts, seen = [*texts, text], [*seen, reads]
    counts = [
        _agreement(text, last, length, tokens) * is_seen[None, :, None].astype(jnp.int32)
        for text, is_seen in zip(texts, seen, strict=True)
    ]
    alike, known = functools.reduce(jnp.add, counts).astype(jnp.float32)
    stands = (alike >= min_share * known) & (tokens > 0)
    most = (max_factor * length.astype(jnp.float32)).astype(jnp.int32)
    stands &= j < most[:, None]
    return jnp.where(jnp.cumprod(stands, axis=1) > 0, tokens - 1, -1)


def _longest(text: Array, last: Array, age: Array, num_drafts: int) -> tuple[Array, Array]:
    """Returns the length of the longest match of each row, [B], 0 for none, and its age.

    text: [B or 1, n + N + K], where N tokens are searched. last: [B, n], the last tokens, the
    last one first. age: [1, N], of each token, higher for later ones: of equally long matches the
    latest counts.
    """
    n, N = last.shape[1], age.shape[1]
    goes_on = text[:, n + 1 : n + 1 + N] > 0
    length = jnp.where(goes_on, _lengths(text, last, num_drafts), 0)
    best = jnp.where(length > 0, length * N + age, 0).max(1)  # a length outweighs all ages
    return best // N, best % N


def _lengths(text: Array, last: Array, num_drafts: int) -> Array:
    """Returns how many tokens up to each one are the last ones of each row, [B, N]."""
    n, N = last.shape[1], text.shape[1] - last.shape[1] - num_drafts
    runs = jnp.ones((last.shape[0], N), jnp.bool)
    length = jnp.zeros(runs.shape, jnp.int32)
    for i in range(n):
        runs &= text[:, n - i : n - i + N] == last[:, i : i + 1]
        length += runs.astype(jnp.int32)
    return length


def _agreement(text: Array, last: Array, length: Array, tokens: Array) -> Array:
    """Returns how many matches of `length`, [B], go on with the drafts `tokens`, [B, K], up to
    each one, and how many go on so far: [2, B, K]."""
    n, K = last.shape[1], tokens.shape[1]
    found = _lengths(text, last, K)
    N = found.shape[1]
    is_match = (found == length[:, None]) & (found > 0)
    alike = known = is_match
    counts = []
    for j in range(K):
        following = text[:, n + 1 + j : n + 1 + j + N]
        known &= following > 0
        alike &= following == tokens[:, j : j + 1]
        counts.append((alike.sum(1), known.sum(1)))
    return jnp.stack([jnp.stack(c, 1) for c in zip(*counts, strict=True)]).astype(jnp.int32)
