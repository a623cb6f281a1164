"""A driver of a scheduler, which does at random all that an engine may."""

from collections import Counter, deque
from dataclasses import replace
import random

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.caches.cache_group import has_checkpoints
from jaxrunner.scheduling.request import Request, SchedulerOutput, Status
from jaxrunner.scheduling.scheduler import Scheduler
from jaxrunner.scheduling.state_pool import make_pools
from tests.support.fake_device import VOCAB_SIZE, Device, alone
from tests.support.loads import Load
from tests.support.toy_remote import ToyRemote

EOS = 3
SALTS = (b"", b"", b"", b"tenant")


class Driver:
    """Adds, aborts, schedules and reads at random; checks what must always hold."""

    def __init__(self, load: Load, seed: int, num_steps: int):
        self.load, self.rng, self.seen = load, random.Random(seed), Counter()
        self.num_steps = num_steps
        sized = [replace(g, num_blocks=g.num_blocks or load.num_blocks) for g in load.groups]
        self.pools = make_pools(sized, enable_caching=load.caching)
        self.device = Device(load.groups, load.num_blocks, load.max_num_seqs, load.num_drafts)
        self.remote = ToyRemote(self.device, seed) if load.remote else None
        self.scheduler = Scheduler(
            load.groups, self.pools, max_num_seqs=load.max_num_seqs, policy=load.policy,
            max_num_batched_tokens=load.budget, max_model_len=load.max_model_len,
            long_prefill_token_threshold=load.threshold, step_sizes=load.sizes,
            num_drafts=load.num_drafts, adaptive=load.adaptive, remote=self.remote,
            num_stages=load.num_stages,
        )  # fmt: skip
        self.queue: deque[SchedulerOutput] = deque()
        self.requests: list[Request] = []
        self.gained: dict[Request, list[int]] = {}
        self.ended: deque[list[int]] = deque(maxlen=4)  # tokens, for others to continue
        self.bases = [self.tokens(self.rng.randint(8, 30)) for _ in range(3)]

    def tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(n)]

    def add(self, first: Request | None = None) -> None:
        """Adds a request; many continue a prefix, some under an id that just became free."""
        rng, length = self.rng, self.load.max_model_len
        base = rng.choice([*self.bases, *self.ended])
        prompt = base[: rng.randint(0, 2 * len(base))] + self.tokens(rng.randint(1, 8))
        prompt = prompt[: rng.randint(length // 2, length - 1)]
        prompt = prompt if first is None else first.prompt_token_ids
        max_len = min(length, len(prompt) + rng.randint(1, 24))
        stops = rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1]))
        params = SamplingParams(
            max_tokens=max_len - len(prompt),
            min_tokens=rng.randint(0, min(4, max_len - len(prompt))),
            stop_token_ids=stops,
        )
        live = {r.request_id for r in self.requests if r.status is not Status.FINISHED}
        request = Request(
            request_id=rng.choice([str(i) for i in range(40) if str(i) not in live]),
            prompt_token_ids=prompt, params=params, seed=0, max_len=max_len,
            stop_ids=frozenset({EOS, *stops}), priority=rng.randint(0, 3),
            cache_salt=rng.choice(SALTS) if first is None else first.cache_salt, prefix_from=first,
        )  # fmt: skip
        self.scheduler.add(request)
        self.requests.append(request)
        if rng.random() < 0.2:
            request.publishes_prefix = True
            self.add(first=request)

    def step(self) -> None:
        """Schedules up to `depth` steps ahead, then reads the oldest."""
        while sum(bool(output.requests) for output in self.queue) < self.load.depth:
            if not self.schedule():
                break
        while self.queue:
            output = self.queue.popleft()
            sampled = self.device.run(output)
            if self.remote is not None:
                self.remote.num_run += 1
            if output.requests:
                self.update(output, sampled)
                break

    def schedule(self) -> bool:
        if self.load.num_drafts and self.rng.random() < 0.1:
            self.scheduler.num_drafts = self.rng.randint(0, self.load.num_drafts)
        output = self.scheduler.schedule(self.load.num_steps)
        self.queue.append(output)
        if self.remote is not None:
            self.remote.num_scheduled += 1
        assert max(output.num_drafts.values(), default=0) <= output.num_proposed
        if self.load.adaptive and output.num_proposed:
            most = output.num_steps * (1 + output.num_proposed)
            assert max(output.num_scheduled_tokens.values(), default=0) <= most
            assert not output.scheduled_new_reqs
            self.seen["adaptive"] += len(output.num_drafts)
        self.seen["several"] += output.num_steps > 1
        self.seen["steps"] += bool(output.requests)
        self.seen["hits"] += sum(new.num_computed > 0 for new in output.scheduled_new_reqs)
        self.seen["copies"] += sum(len(new.copies) > 0 for new in output.scheduled_new_reqs)
        assert output.total_num_scheduled_tokens <= self.load.budget * output.num_steps
        assert output.num_steps == 1 or not output.scheduled_new_reqs
        assert min(output.num_scheduled_tokens.values(), default=1) > 0
        assert self.scheduler.num_running <= self.load.max_num_seqs
        assert output.num_scheduled_tokens.keys() == output.requests.keys()
        assert output.new_block_ids.keys() | output.num_drafts.keys() <= output.requests.keys()
        assert not output.preempted_req_ids & output.requests.keys()
        assert not (output.preempted_req_ids and output.scheduled_new_reqs)
        self.check()
        return bool(output.requests)

    def update(self, output: SchedulerOutput, sampled) -> None:
        running = set(self.scheduler.running)
        for request, tokens in self.scheduler.update(output, sampled):
            self.gained.setdefault(request, []).extend(tokens)
            late = request not in running
            self.seen["late"] += late
            self.seen["late end"] += late and request.status is Status.FINISHED
        self.check()

    def disturb(self) -> None:
        """Aborts a request now and then; rarely all, and forgets what they computed."""
        live = [r.request_id for r in self.requests if r.status is not Status.FINISHED]
        if live and self.rng.random() < (0.02 if self.remote is None else 0.08):
            self.scheduler.finish([self.rng.choice(live)], "abort")
        if self.rng.random() < 0.01:
            self.scheduler.finish(live, "abort")
            self.scheduler.recall()
            assert self.scheduler.reset_prefix_cache()
            self.seen["resets"] += 1
        if self.remote is not None and self.rng.random() < 0.01:
            self.queue.clear()  # the device has failed
            self.remote.num_run = self.remote.num_scheduled
            self.device.rows.clear()
            self.device.kv = [[None] * len(kv) for kv in self.device.kv]
            self.scheduler.restart()

    def check(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.num_waiting
        for g, pool in enumerate(self.pools):
            pool.check([request.blocks[g] for request in self.scheduler.holders])
            self.seen["windowed"] += any(pool.null_block in r.blocks[g] for r in running)
            if has_checkpoints([self.load.groups[g].kind]):
                self.check_states(g)
        if not self.queue:  # nothing is in flight
            counts = {r.request_id: (r.num_computed, r.num_tokens) for r in running}
            rows = ((r, self.device.rows[r]) for r in counts)
            assert counts == {r: (row.num_computed, len(row.tokens)) for r, row in rows}
        assert all(r.num_drafts_in_flight <= r.num_in_flight for r in self.requests)
        unfinished = sum(r.status is not Status.FINISHED for r in self.requests)
        assert unfinished == len(running) + waiting

    def check_states(self, g: int) -> None:
        """Checks that nobody shares or finds a state that is to be written again."""
        pool, requests = self.pools[g], self.scheduler.running
        owners = Counter(block for request in requests for block in request.blocks[g])
        for request in requests:
            place, offset = divmod(request.num_computed, pool.block_size)
            if offset and not self.load.num_drafts:
                block = request.blocks[g][place]
                assert owners[block] == 1 and not pool.is_published(block)
        found = {b for b in pool.filled() if pool.is_published(b) and pool.is_free(b)}
        unknown = {b for b in range(pool.num_blocks) if pool.is_free(b)} - found
        del owners[pool.null_block]
        assert len(found) + len(unknown) + len(owners) == pool.num_blocks
        self.seen["checkpoints"] += len(found) > 0

    def run(self) -> None:
        """Runs the load, then lets it drain, unless it makes no progress."""
        idle = 0
        while self.seen["steps"] < self.num_steps:
            before = self.seen["steps"]
            if self.scheduler.num_waiting < 4 and self.rng.random() < 0.4:
                self.add()
            self.disturb()
            self.step()
            self.requests = self.judge()
            moved = self.seen["steps"] > before or not self.scheduler.has_unfinished
            idle = 0 if moved else idle + 1
            assert idle < 20, "no progress"
        for _ in range(500):
            self.step()
            if not (self.scheduler.has_unfinished or self.queue or [*self.scheduler.holders]):
                break
        self.requests = self.judge()

    def judge(self) -> list[Request]:
        """Compares each ended request with a run alone. Returns the others."""
        for request in self.requests:
            if request.status is Status.FINISHED:
                wanted, outputs = alone(request), request.output_token_ids
                assert outputs == self.gained.get(request, [])
                cut = request.finish_reason == "abort"
                assert outputs == (wanted[: len(outputs)] if cut else wanted)
                assert request.num_in_flight == 0
                self.seen[request.finish_reason] += 1
                self.ended.append(request.token_ids)
        return [r for r in self.requests if r.status is not Status.FINISHED]
