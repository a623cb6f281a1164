"""The policy of adaptive drafts against a machine whose times and acceptance are known."""

import time

import numpy as np
import pytest

from jaxrunner.scheduling import draft_policy
from jaxrunner.scheduling.draft_policy import DraftPolicy
from jaxrunner.scheduling.request import SchedulerOutput, admitted
from tests.support.scheduling import new

K = 3
BUCKETS = [(rows, k) for k in (0, K) for rows in (1, 8, 64)]


class Machine:
    """Runs steps of `num_rows` requests, and knows how long they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, verify: float, accept: float):
        """verify: how many times longer a step with drafts takes; accept: share of each draft."""
        self.now, self.verify, self.accept = 100.0, verify, accept
        self.rng, self.policy = np.random.default_rng(0), DraftPolicy(BUCKETS)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def step(self, num_rows: int, *, pause: float = 0.0) -> int:
        """Returns the drafts of the step."""
        num_drafts, began = self.policy.choose(num_rows), self.now
        self.now += (self.verify if num_drafts else 1.0) + pause
        stands = self.rng.random((num_rows, K)) < self.accept
        accepted = np.cumprod(stands, axis=1)
        drafts = np.concatenate([np.ones((num_rows, 3), int), accepted], 1)
        counts = {str(i): 1 + num_drafts for i in range(num_rows)}
        planned = dict.fromkeys(counts, num_drafts) if num_drafts else {}
        output = SchedulerOutput(
            num_scheduled_tokens=counts, num_proposed=num_drafts, num_drafts=planned
        )
        self.policy.observe(output, began, drafts * bool(num_drafts))
        return num_drafts

    def share(self, num_rows: int, num_steps: int = 600, **rest: float) -> float:
        """Returns how many of so many steps have drafts."""
        return sum(self.step(num_rows, **rest) > 0 for _ in range(num_steps)) / num_steps


@pytest.mark.parametrize(
    "verify,accept,pays",
    [(1.1, 0.6, True), (1.9, 0.6, True), (2.6, 0.6, False), (1.2, 0.0, False), (3.0, 0.95, True)],
)
@pytest.mark.parametrize("num_rows", [1, 5, 64])
def test_the_number_is_what_gives_more_tokens_a_second(monkeypatch, verify, accept, pays, num_rows):
    machine = Machine(monkeypatch, verify=verify, accept=accept)
    machine.share(num_rows, 2000)  # what is expected at first is forgotten
    share = machine.share(num_rows, 2048)
    tried = draft_policy.NUM_TRIED / draft_policy.PERIOD
    assert share == pytest.approx(1 - tried if pays else tried)


def test_a_step_of_several_data_ranks_has_the_rows_of_the_one_with_most(monkeypatch):
    policy = Machine(monkeypatch, verify=1.1, accept=0.6).policy
    ranks = [{"a": 1}, {}, {str(i): 1 for i in range(8)}]
    parts = [SchedulerOutput(num_scheduled_tokens=counts) for counts in ranks]
    whole = SchedulerOutput(parts=parts, num_scheduled_tokens=ranks[0] | ranks[2])
    policy.observe(whole, 100.0, None)
    assert [*policy._seconds] == [(0, 8)]  # nine requests in one would be in the next size


def test_it_follows_what_changes(monkeypatch):
    machine = Machine(monkeypatch, verify=1.6, accept=0.8)
    assert machine.share(8) > 0.9
    machine.accept = 0.1
    machine.share(8)
    assert machine.share(8, 512) < 0.05
    machine.accept = 0.8
    machine.share(8, 8000)
    assert machine.share(8, 512) > 0.9
    machine.verify = 8.0
    machine.share(8, 1000)
    assert machine.share(8, 512) < 0.05


def test_sizes_are_apart(monkeypatch):
    machine = Machine(monkeypatch, verify=1.2, accept=0.6)
    machine.share(1)
    machine.verify = 3.0
    machine.share(64)
    assert machine.share(64, 512) < 0.05
    machine.verify = 1.2
    assert machine.share(1, 512) > 0.9


def test_pauses_of_the_host_do_not_count(monkeypatch):
    machine = Machine(monkeypatch, verify=1.5, accept=0.6)
    for i in range(600):
        machine.step(8, pause=20.0 * (i % 3 == 1))
    times = {key: seconds for key, (_, seconds) in machine.policy._seconds.items()}
    assert times[K, 8] / times[0, 8] == pytest.approx(1.5, rel=0.05)


def test_steps_that_compute_prompts_say_nothing_of_times(monkeypatch):
    machine = Machine(monkeypatch, verify=1.2, accept=0.6)
    prompts = SchedulerOutput(num_scheduled_tokens={"a": 9, "b": 1})
    started = SchedulerOutput(
        num_scheduled_tokens={"a": 1}, scheduled_new_reqs=[admitted(new("a", 1))]
    )
    for output in (prompts, started):
        machine.policy.observe(output, 0.0, None)
    assert not machine.policy._seconds


def test_what_was_not_verified_says_nothing_of_acceptance(monkeypatch):
    machine = Machine(monkeypatch, verify=1.2, accept=0.6)
    machine.policy = DraftPolicy([(1, 0), (8, 0), (1, K), (8, 1)])
    machine.share(1, 2000)
    behind = [
        machine.policy.tokens_of_a_step(k) - machine.policy.tokens_of_a_step(1) for k in (2, K)
    ]
    machine.accept = 0.9
    assert {machine.step(5) for _ in range(600)} == {0, 1}
    policy = machine.policy
    assert policy.tokens_of_a_step(1) == pytest.approx(1.9, abs=0.1)
    now = [policy.tokens_of_a_step(k) - policy.tokens_of_a_step(1) for k in (2, K)]
    assert now == pytest.approx(behind)


def test_where_one_number_fits_there_is_no_choice():
    policy = DraftPolicy([*BUCKETS, (128, 0)])
    assert policy.choose(100) == 0
    assert DraftPolicy([(8, K)]).choose(3) == K
