"""A request as the host sees it, and what one scheduled step says of requests. Knows no JAX."""

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
    WAITING_FOR_REMOTE = "waiting for remote"  # owns KV blocks that something remote fills
    RUNNING = "running"  # owns KV blocks and a slot
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request from admission to its end. Lengths and counts are in tokens.

    The scheduler alone changes the fields below `arrival`, outputs through `stop.append_tokens`.
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
    lora_id: int = 0  # of its adapter, 0 for none
    cache_limit: int = NEVER  # most tokens whose KV may be taken from the prefix cache
    leader: "Request | None" = None  # one with the same prompt, to be computed first
    leads: bool = False  # whether others have this one as their leader
    prompt_logprobs_start: int = NEVER  # position of the first prompt token whose logprob is wanted
    arrival: int = 0  # order of `Scheduler.add`

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_tokens: int = field(init=False)  # prompt and output; a count, as every step asks for it
    blocks: tuple[list[int], ...] = ()  # by cache group; the pool's `null_block` where skipped
    block_hashes: tuple[list[bytes], ...] = ()  # by cache group, one a full block of known tokens
    weights_version: int = 0  # at its admission: it shares blocks only with requests of the same
    num_held: int = 0  # tokens that `blocks` have room for
    full_len: int = 0  # known tokens at which another block is full, and to be published
    num_computed: int = 0  # tokens launched, an upper bound of what the device has computed
    num_in_flight: int = 0  # most tokens that steps launched and not yet read may sample
    num_drafts_in_flight: int = 0  # of these, drafts: so many fewer if all are rejected
    num_drafts: int = 0  # that the device proposed for its next step
    draft_token_ids: list[int] = field(default_factory=list)  # these, if it has a grammar
    num_cached_tokens: int = 0  # tokens found in the prefix cache at the first admission
    finish_reason: str | None = None  # of `FINISH_REASONS`
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    error: str | None = None  # why it failed, with the finish reason "error"
    grammar: Any = None  # a `grammar_compiler.Grammar` that has seen all known output
    # Steps that verified drafts of it, these drafts, and how many steps accepted each of a step's.
    draft_counts: tuple[int, ...] = ()
    heads: dict[str, list[np.ndarray]] = field(default_factory=dict)  # what these said, by step
    logprobs: list[Any] = field(default_factory=list)  # parts of outputs: `Logprobs`, [N]
    prompt_logprobs: list[Any] = field(default_factory=list)  # parts: positions, `Logprobs`
    # Of all tokens but the last, int16 [tokens, layers, k]: what experts computed them, once it has
    # ended, and given ones that are to compute its prompt.
    routed_experts: Any = None
    given_routes: np.ndarray | None = None

    def __post_init__(self):
        self.num_tokens = len(self.prompt_token_ids) + len(self.output_token_ids)

    def check_lengths(self, max_model_len: int) -> None:
        """Checks that there is a prompt, and room for a token behind it.

        Raises:
          ValueError: there is not.
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
        """Its tokens once all launched steps are done, at most."""
        return self.num_tokens + self.num_in_flight

    @property
    def least_known(self) -> int:
        """Its tokens once all launched steps are done and all drafts rejected, unless it ended."""
        return self.num_tokens + self.num_in_flight - self.num_drafts_in_flight

    @property
    def num_missing(self) -> int:
        """Tokens, drafts aside, that can be computed next while it runs; 0 if it must end first."""
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
    eos_token_ids: tuple[int, ...] = ()  # banned below `min_tokens`, where they end nothing too
    copies: tuple[tuple[int, int], ...] = ()  # blocks to copy, from and to, by cache group
    cache_salt: bytes = b""  # requests share cached blocks only with equal salts
    lora_id: int = 0  # of its adapter, 0 for none
    data_rank: int = 0  # that has it
    lora_place: int = 0  # of its adapter on the device, plus one; a runner sets it

    @property
    def stop_row(self) -> list[int]:
        """What the device's table has of stop ids: ~token is banned below `min_tokens` alone."""
        eos = self.eos_token_ids if self.params.min_tokens else ()
        return [*sorted(self.stop_ids), *(~token for token in eos if token not in self.stop_ids)]


def admitted(request: Request, copies: tuple[tuple[int, int], ...] = ()) -> NewRequest:
    """Returns what the device is told of a request that starts."""
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
    """One step: who enters, who leaves, who computes how many tokens."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)  # to append
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # all > 0
    # Drafts among them, behind the last token there is; requests without drafts are absent.
    num_drafts: dict[str, int] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)  # since the last step
    preempted_req_ids: set[str] = field(default_factory=set)  # in this step
    requests: dict[str, Request] = field(default_factory=dict)  # the scheduled ones
    num_proposed: int = 0  # drafts of each request that samples, for its next step, at least
    # Of this launch. Of several, each computes a token of each request, and its drafts; then
    # `num_scheduled_tokens` are the most tokens that all of them give, `num_drafts` those of one.
    num_steps: int = 1
    parts: list["SchedulerOutput"] = field(default_factory=list)  # by data rank, where there are
    replays_routes: bool = False  # whether it has tokens with given routes, or may have

    @property
    def num_rows(self) -> int:
        """Rows that the step has, of each data rank."""
        return max(len(part.num_scheduled_tokens) for part in self.parts or [self])

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


def awaits_prefix(request: Request, output: SchedulerOutput) -> bool:
    """Whether a request should wait for another that computes the same prompt in these steps."""
    leader = request.leader
    if leader is None or leader.status is Status.FINISHED:
        return False
    now = output.num_scheduled_tokens.get(leader.request_id, 0)
    return leader.num_computed - now < len(leader.prompt_token_ids)


class GrammarOutput(NamedTuple):
    """Which tokens a grammar allows, for some requests of a step."""

    req_ids: tuple[str, ...]
    # [requests, (J,) ceil(V / 32)], int32; token t is bit t % 32 of word t // 32. One row of each
    # position that a request verifies, others allow all; or one row of all positions.
    bitmask: np.ndarray
