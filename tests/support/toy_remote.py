"""Another engine, for tests of the scheduler: it fills and reads the device's KV slots late."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
import random

from jaxrunner.scheduling.request import Request
from tests.support.fake_device import Device, prefixes

GARBAGE = -1


@dataclass
class Job:
    """A transfer under way: of tokens `start` to `end` - 1, into the cache or out of it."""

    request: Request
    tables: tuple[list[int], ...]
    start: int
    end: int
    fence: int  # steps that must have run before it
    kind: str  # "loaded", "failed", "given up" or "sent"


class ToyRemote:
    """A `RemoteSource` that knows something of some requests, and fails now and then."""

    def __init__(self, device: Device, seed: int):
        self.device, self.rng, self.seen = device, random.Random(seed), Counter[str]()
        self.num_scheduled = self.num_run = 0  # steps, which the test counts
        self.jobs: list[Job] = []

    def lookup(self, request: Request, num_computed: int) -> int | None:
        assert not request.blocks and num_computed < request.num_tokens
        kind = self.rng.choice(["unknown", "nothing", "some", "some", "all"])
        self.seen["unknown"] += kind == "unknown"
        some = self.rng.randint(1, request.num_tokens)
        return {"unknown": None, "nothing": 0, "some": some, "all": 1000}[kind]

    def start(self, request: Request, num_computed: int, num_tokens: int) -> None:
        assert num_computed < num_tokens < request.num_tokens
        kind = "failed" if self.rng.random() < 0.3 else "loaded"
        self._add(request, num_computed, num_tokens, kind)

    def poll(self, *, wait: bool) -> Iterable[tuple[Request, bool]]:
        ready = [job for job in self.jobs if job.fence <= self.num_run]
        due = [job for job in ready if self.rng.random() < 0.5]
        for job in due or ready[: int(wait)]:
            self.jobs.remove(job)
            self.seen[job.kind] += 1
            self._move(job)
            yield job.request, job.kind == "loaded"

    def release(self, request: Request) -> bool:
        for job in self.jobs:
            if job.request is request:
                job.kind = "given up"
                return False
        if not request.blocks or not request.num_computed or self.rng.random() < 0.5:
            return True
        # The device need not have computed the last token.
        self._add(request, 0, min(request.num_computed, request.num_tokens - 1), "sent")
        return False

    def reset(self) -> None:
        self.jobs.clear()

    def _add(self, request: Request, start: int, end: int, kind: str) -> None:
        tables = tuple(list(table) for table in request.blocks)
        # The step that is being planned may still copy from these blocks.
        self.jobs.append(Job(request, tables, start, end, self.num_scheduled + 1, kind))

    def _move(self, job: Job) -> None:
        keys = prefixes(job.request.token_ids, job.request.cache_salt)
        for kv, slot, position in self._slots(job):
            if job.kind == "sent":
                assert kv[slot] == keys[position], f"foreign KV at {position} of what is sent"
            else:
                kv[slot] = keys[position] if job.kind == "loaded" else GARBAGE

    def _slots(self, job: Job) -> Iterator[tuple[list[int | None], int, int]]:
        for kv, group, table in zip(self.device.kv, self.device.groups, job.tables, strict=True):
            for position in range(job.start, job.end):
                block, offset = divmod(position, group.block_size)
                if table[block] < len(kv) // group.block_size:  # not the null block
                    yield kv, table[block] * group.block_size + offset, position
