"""A request as the host sees it, and what one scheduled step says of requests. Knows no JAX."""

from dataclasses import dataclass, field
from enum import Enum

from jaxrunner.params import SamplingParams


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"  # new, or preempted and to be computed again
    RUNNING = "running"  # owns KV blocks
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One request from admission to its end. Lengths and counts are in tokens.

    The scheduler alone changes the fields below `arrival`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int  # drawn once, so that preemption does not change the noise
    max_len: int  # length, prompt included, at which the request ends
    stop_ids: frozenset[int] = frozenset()  # tokens that end it, EOS included unless ignored
    priority: int = 0  # smaller runs first under the priority policy
    cache_salt: bytes = b""  # requests share cached blocks only with equal salts
    arrival: int = 0  # order of `Scheduler.add`

    status: Status = Status.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    blocks: tuple[list[int], ...] = ()  # by cache group; the pool's `null_block` where skipped
    block_hashes: tuple[list[bytes], ...] = ()  # by cache group, one a full block of known tokens
    num_computed: int = 0  # tokens launched, an upper bound of what the device has computed
    num_in_flight: int = 0  # sampled tokens launched and not yet read
    num_cached_tokens: int = 0  # tokens found in the prefix cache at the first admission
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop id or stop string that ended it

    @property
    def token_ids(self) -> list[int]:
        """All tokens that the host knows."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


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


@dataclass
class SchedulerOutput:
    """One step: who enters, who leaves, who computes how many tokens."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    new_block_ids: dict[str, tuple[list[int], ...]] = field(default_factory=dict)  # to append
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # all > 0
    finished_req_ids: set[str] = field(default_factory=set)  # since the last step
    preempted_req_ids: set[str] = field(default_factory=set)  # in this step
    requests: dict[str, Request] = field(default_factory=dict)  # the scheduled ones

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())
