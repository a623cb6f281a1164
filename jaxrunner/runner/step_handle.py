"""The handle of a step in flight, and the output that the host reads from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
import time
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jaxrunner.errors import NO_CHOICE, NO_NUMBER, StepTimeout
from jaxrunner.parallel.stage_link import Told
from jaxrunner.parallel.time_limit import arrives_within
from jaxrunner.program.bucket import Bucket, MultiStepBucket, SampleSize
from jaxrunner.programs.launch_thread import Launched
from jaxrunner.runner.phases import phase
from jaxrunner.scheduling.request import Request
from jaxrunner.types import Logprobs

NewTokens = list[tuple[Request, list[int]]]  # requests that gained tokens or ended, with these
AWAITED = jax.Array, Told, Launched  # types of outputs that may still be on their way to the host


class Work(NamedTuple):
    """A step that is about to be launched."""

    req_ids: tuple[str, ...]  # in row order
    bucket: Bucket | MultiStepBucket
    plan: np.ndarray  # packed
    size: SampleSize
    num_targets: int  # prompt tokens to score, at most
    target_columns: int
    counts: tuple[int, ...] = ()  # tokens of each row; they split the outputs of token heads


class PromptLogprobs(NamedTuple):
    """Logprobs of tokens of a prompt."""

    req_id: str
    positions: np.ndarray  # of the tokens, [U]
    logprobs: Logprobs  # [U] and [U, C]


@dataclass(frozen=True)
class ModelRunnerOutput:
    """The sampled tokens of a step, and its other outputs, in row order."""

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[list[int], ...] = ()  # [] for a request in mid-prefill
    # For schedulers of others: ended by an id or a length. Ours knows it from the tokens.
    finished: tuple[bool, ...] = ()
    not_finite: tuple[bool, ...] = ()  # logits were NaN or infinite: the token is meaningless
    no_choice: tuple[bool, ...] = ()  # no token was left to sample from
    logprobs: Logprobs | None = None  # of the sampled tokens, [B, J] and [B, J, C]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    # [B, 3 + K], counts as in `types.StepOutput.drafts`.
    drafts: np.ndarray | None = None
    # In a step with grammars: drafts of each row that the next step verifies, for its masks.
    draft_token_ids: tuple[list[int], ...] = ()
    # By head, then by row: an array for the row, or with an axis of its tokens.
    heads: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)
    token_heads: tuple[str, ...] = ()  # heads with an array for each token

    def failures(self, nan_policy: str) -> dict[str, str]:
        """Returns the errors of requests whose sampled token is invalid, by request id."""
        failed: dict[str, str] = {}
        if True not in self.not_finite and True not in self.no_choice:
            return failed
        for i, req_id in enumerate(self.req_ids):
            if self.not_finite[i] and nan_policy != "ignore":
                failed[req_id] = NO_NUMBER
            elif self.no_choice[i]:
                failed[req_id] = NO_CHOICE
        return failed

    def share(self, gained: NewTokens) -> None:
        """Adds to each request its draft counts, next drafts (with a grammar), outputs of heads,
        and logprobs of its new tokens.

        Rows are copied, so that the arrays of the whole batch are freed.
        """
        if self.logprobs is None and self.drafts is None and not self.heads:
            return
        row_of = {req_id: row for row, req_id in enumerate(self.req_ids)}
        of_rows = [name for name in self.heads if name not in self.token_heads]
        for request, tokens in gained:
            row, count = row_of[request.request_id], len(tokens)
            if self.logprobs is not None and request.params.num_logprobs is not None:
                one = jax.tree.map(lambda x, r=row, n=count: x[r, :n].copy(), self.logprobs)
                request.logprobs.append(one)
            if self.drafts is not None:
                counts = self.drafts[row, 1:].tolist()
                before = request.draft_counts or (0,) * len(counts)
                request.draft_counts = tuple(map(sum, zip(before, counts, strict=True)))
            if self.draft_token_ids and request.grammar is not None:
                request.draft_token_ids = self.draft_token_ids[row]
            for name in of_rows:
                request.heads.setdefault(name, []).append(self.heads[name][row].copy())

    def share_tokens(self, requests: Mapping[str, Request]) -> None:
        """Adds outputs of token heads and prompt logprobs to requests that have not ended."""
        for row, req_id in enumerate(self.req_ids if self.token_heads else ()):
            if (request := requests[req_id]).finish_reason is None:
                for name in self.token_heads:
                    request.heads.setdefault(name, []).append(self.heads[name][row].copy())
        for part in self.prompt_logprobs:
            request = requests[part.req_id]
            if request.finish_reason is None:
                request.prompt_logprobs.append(part[1:])


class StepHandle:
    """A step in flight."""

    def __init__(
        self, req_ids: tuple[str, ...] = (), layout: Any = None, packed: Any = None,
        counts: tuple[int, ...] = (), token_heads: tuple[str, ...] = (),
    ):  # fmt: skip
        self.req_ids, self._layout, self._packed = req_ids, layout, packed
        self._counts, self._token_heads = counts, token_heads
        self.launched_at = time.perf_counter()
        self._scores: list[tuple[Any, Any]] = []
        self._names: dict[int, str] = {}
        self._drafts: Any = None
        if packed is not None:
            packed.copy_to_host_async()

    def expect_scores(self, names: dict[int, str], scores: list[tuple[Any, Any]]) -> None:
        """Adds prompt logprobs to what `get` returns; names: the request of each slot."""
        self._names, self._scores = names, scores
        for _, packed in scores:
            if isinstance(packed, AWAITED):
                packed.copy_to_host_async()

    def expect_drafts(self, drafts: jax.Array) -> None:
        """Adds drafts for the next step, [B, K], to what `get` returns."""
        self._drafts = drafts
        drafts.copy_to_host_async()

    @property
    def is_ready(self) -> bool:
        """Whether the device has done the step, so that `get` at most waits for a copy."""
        return all(cast(Any, x).is_ready() for x in self._arrays())

    def _arrays(self) -> list[jax.Array | Told | Launched]:
        arrays: list[Any] = [self._packed, self._drafts, *(packed for _, packed in self._scores)]
        return [x for x in arrays if isinstance(x, AWAITED)]

    @phase("wait")
    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the step's outputs are on the host.

        Raises:
          StepTimeout: the device has not done the step in `timeout_s`.
        """
        if timeout_s is not None and not self.is_ready:
            for told in (x for x in self._arrays() if isinstance(x, Told)):
                told.wait(timeout_s)
            if not arrives_within(timeout_s, self._arrays()):
                raise StepTimeout(
                    f"the device did not do the step in timeout_s={timeout_s:.3f}: wait longer, or "
                    "end the process if the device hangs"
                )
        self._packed = np.asarray(self._packed)
        self._drafts = None if self._drafts is None else np.asarray(self._drafts)
        self._scores = [(layout, np.asarray(packed)) for layout, packed in self._scores]

    def get(self, timeout_s: float | None = None) -> ModelRunnerOutput:
        """Waits for the step and returns what it sampled; raises as `wait`."""
        if self._packed is None:
            return ModelRunnerOutput()
        self.wait(timeout_s)
        n = len(self.req_ids)
        out = self._layout.read(self._packed)
        counts = out.num_sampled[:n].tolist()
        tokens = out.token_ids[:n].tolist()
        flags = (flag[:n].tolist() for flag in (out.finished, out.not_finite, out.no_choice))
        shape = out.token_ids.shape
        logprobs = [
            jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), p) for p in out.logprobs
        ]
        return ModelRunnerOutput(
            self.req_ids,
            tuple(row[:count] for row, count in zip(tokens, counts, strict=True)),
            *map(tuple, flags),
            logprobs=logprobs[0] if logprobs else None,
            prompt_logprobs=tuple(self._prompt_logprobs()),
            drafts=out.drafts,
            draft_token_ids=tuple(() if self._drafts is None else self._drafts[:n].tolist()),
            heads=dict(out.heads) | self._of_tokens(out.heads),
            token_heads=self._token_heads,
        )

    def _of_tokens(self, heads: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Returns the arrays of token heads, [T, ...], split into rows, by head."""
        ends = np.cumsum(self._counts) if self._token_heads else ()
        return {name: np.split(heads[name], ends)[:-1] for name in self._token_heads}

    def _prompt_logprobs(self) -> Iterator[PromptLogprobs]:
        for layout, packed in self._scores:
            slots, positions, logprobs = layout.read(packed)
            for slot in np.unique(slots[positions > 0]).tolist():
                mine = (slots == slot) & (positions > 0)
                part = jax.tree.map(lambda x, mine=mine: x[mine], logprobs)
                yield PromptLogprobs(self._names[slot], positions[mine], part)


def merged(gained: NewTokens) -> NewTokens:
    """Returns the new tokens of several steps, with each request once."""
    if len({request for request, _ in gained}) == len(gained):
        return gained
    tokens_of: dict[Request, list[int]] = {}
    for request, tokens in gained:
        tokens_of.setdefault(request, []).extend(tokens)
    return list(tokens_of.items())
