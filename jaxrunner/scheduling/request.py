"""Requests on the host, and the output of one scheduled step. Knows no JAX."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams

NEVER = 2**30  # a position beyond all
FINISH_REASONS = ("stop", "length", "repetition", "abort", "error")


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # new, or preempted and to be computed again
    WAITING_FOR_REMOTE = "waiting for remote"  # owns KV blocks that a remote source fills
    RUNNING = "running"  # owns KV blocks and a slot
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request from admission to its end. Lengths and counts are in tokens.

    Only the scheduler changes the fields below `arrival`, outputs through `stop.append_tokens`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # drawn once, so that preemption does not change the noise
    max_len: int  # length, prompt included, at which the request ends
    stop_ids: frozenset[int] = frozenset()  # tokens that end it, EOS included unless ignored
    eos_token_ids: tuple[int, ...] = ()  # ignored or not; the end at the first has no `stop_reason`
    priority: int = 0  # smaller runs first under the priority policy
    cache_salt: bytes = b""  # requests share cached blocks only with equal salts
    lora_id: int = 0  # id of its adapter, 0 for none
    cache_limit: int = NEVER  # most tokens whose KV may be taken from the prefix cache
    prefix_from: "Request | None" = None  # of the same prompt: waits for its blocks
    publishes_prefix: bool = False  # for requests that share it, until its prompt is done
    prompt_logprobs_start: int = NEVER  # position of the first prompt token whose logprob is wanted
    arrival: int = 0  # order of `Scheduler.add`, or of `RequestQueue.put_longest_first`

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output; stored, as every step reads it
    blocks: tuple[list[int], ...] = ()  # by cache group; the pool's `null_block` where skipped
    block_hashes: tuple[list[bytes], ...] = ()  # by cache group, one for each full block
    weights_version: int = 0  # at its admission; requests share blocks only within one version
    num_held: int = 0  # tokens that `blocks` have room for
    full_len: int = 0  # number of known tokens at which the next block is full and published
    num_computed: int = 0  # tokens launched, an upper bound of what the device has computed
    num_in_flight: int = 0  # most tokens that steps launched and not yet read may sample
    num_drafts_in_flight: int = 0  # of these, how many fewer they are if all drafts are rejected
    num_drafts: int = 0  # drafts that the device proposed for its next step
    draft_token_ids: list[int] = field(default_factory=list)  # these drafts, if it has a grammar
    num_cached_tokens: int = 0  # tokens found in the prefix cache at the first admission
    finish_reason: str | None = None  # of `FINISH_REASONS`
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    error: str | None = None  # why it failed, with the finish reason "error"
    grammar: Any = None  # a `grammar_compiler.Grammar` that has seen all known output
    # Steps that verified its drafts, all these drafts, and steps that accepted each of K drafts.
    draft_counts: tuple[int, ...] = ()
    heads: dict[str, list[np.ndarray]] = field(default_factory=dict)  # outputs by step
    logprobs: list[Any] = field(default_factory=list)  # parts of outputs: `Logprobs`, [N]
    prompt_logprobs: list[Any] = field(default_factory=list)  # parts: positions, `Logprobs`
    # int16 [tokens, layers, k]: the experts that computed all tokens but the last, once it has
    # ended; and given experts that compute its prompt.
    routed_experts: Any = None
    given_routes: np.ndarray | None = None

    def __post_init__(self):
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    def check_lengths(self, max_model_len: int) -> None:
        """Checks that the prompt is not empty and leaves room for a token.

        Raises:
          ValueError: it is empty or too long, or `max_len` exceeds `max_model_len`.
        """
        name, prompt_len = f"request {self.request_id!r}", len(self.prompt_token_ids)
        if not prompt_len:
            raise ValueError(f"prompt of {name} must hold at least 1 token, got 0: add a BOS token")
        if self.max_len > max_model_len:
            raise ValueError(
                f"max_len of {name} must be at most max_model_len={max_model_len}, "
                f"got {self.max_len}: ask for fewer tokens or raise max_model_len"
            )
        if prompt_len >= self.max_len:
            raise ValueError(
                f"prompt of {name} has {prompt_len} tokens, max_len={self.max_len} needs room "
                "for one more: shorten the prompt or raise max_len"
            )

    @property
    def num_known(self) -> int:
        """The most tokens that it has once all launched steps are done."""
        return self.num_tokens + self.num_in_flight

    @property
    def least_known(self) -> int:
        """The least tokens that it has then, if all drafts are rejected and it has not ended."""
        return self.num_tokens + self.num_in_flight - self.num_drafts_in_flight

    @property
    def num_missing(self) -> int:
        """Tokens without drafts that its next step can compute; 0 if launched steps will end it."""
        known = self.num_tokens + self.num_in_flight
        if known < self.max_len or known - self.num_drafts_in_flight < self.max_len:
            return known - self.num_computed
        return 0

    @property
    def token_ids(self) -> list[int]:
        """All tokens that the host knows."""
        return self.prompt_token_ids + self.output_token_ids


@dataclass
class NewRequest:
    """A request that enters the device's tables: new, or resumed with all its tokens."""

    request_id: str
    token_ids: list[int]  # prompt, then the outputs of a resumed request
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    block_ids: tuple[list[int], ...]  # the whole table of each cache group
    num_computed: int  # tokens found in the prefix cache
    prompt_logprobs_start: int = NEVER
    eos_token_ids: tuple[int, ...] = ()  # banned below `min_tokens`, also where they are ignored
    copies: tuple[tuple[int, int], ...] = ()  # blocks to copy, from and to, by cache group
    cache_salt: bytes = b""  # requests share cached blocks only with equal salts
    lora_id: int = 0  # of its adapter, 0 for none
    data_rank: int = 0
    lora_place: int = 0  # place of its adapter on the device, plus one; the runner sets it

    @property
    def stop_row(self) -> list[int]:
        """The device's row of stop ids; ~token is only banned below `min_tokens`."""
        eos = self.eos_token_ids if self.params.min_tokens else ()
        return [*sorted(self.stop_ids), *(~token for token in eos if token not in self.stop_ids)]


def admitted(request: Request, copies: tuple[tuple[int, int], ...] = ()) -> NewRequest:
    """Returns a request that starts, in the form for the device's tables."""
    return NewRequest(
        request_id=request.request_id,
        token_ids=request.token_ids,
        prompt_len=len(request.prompt_token_ids),
        params=request.params,
        seed=request.seed,
        max_len=request.max_len,
        stop_ids=request.stop_ids,
        block_ids=tuple(list(table) for table in request.blocks),
        num_computed=request.num_computed,
        prompt_logprobs_start=request.prompt_logprobs_start,
        eos_token_ids=request.eos_token_ids,
        copies=copies,
        cache_salt=request.cache_salt,
        lora_id=request.lora_id,
    )


@dataclass
class SchedulerOutput:
    """One step: requests that enter and leave, and the tokens that each computes."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)  # to append
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # all > 0
    # Drafts among these tokens; requests without drafts are absent.
    num_drafts: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)  # since the last step
    preempted_req_ids: set[str] = field(default_factory=set)  # in this step
    requests: dict[str, Request] = field(default_factory=dict)  # the scheduled ones
    num_proposed: int = 0  # drafts that it proposes at least for each request that samples
    # Steps of the launch. If several, each computes one token of each request and its drafts;
    # `num_scheduled_tokens` are then the most that all steps give, `num_drafts` those of one step.
    num_steps: int = 1
    parts: list["SchedulerOutput"] = field(default_factory=list)  # by data rank, if several
    replays_routes: bool = False  # whether it may have tokens with given routes

    @property
    def num_rows(self) -> int:
        """Rows that the step has, of each data rank."""
        return max(len(part.num_scheduled_tokens) for part in self.parts or [self])

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens of the step, of all its requests."""
        return sum(self.num_scheduled_tokens.values())


def awaits_prefix(request: Request, output: SchedulerOutput) -> bool:
    """Whether a request should wait for the one that still computes the same prompt."""
    first = request.prefix_from
    if first is None or first.status is Status.FINISHED:
        return False
    now = output.num_scheduled_tokens.get(first.request_id, 0)
    return first.num_computed - now < len(first.prompt_token_ids)


class GrammarOutput(NamedTuple):
    """The tokens that grammars allow, for some requests of a step."""

    req_ids: tuple[str, ...]
    # [requests, (J,) ceil(V / 32)], int32; token t is bit t % 32 of word t // 32. With J a row for
    # each verified position, where others allow all tokens; without J one row for all positions.
    bitmask: np.ndarray
