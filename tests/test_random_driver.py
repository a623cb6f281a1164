"""Random loads on a scheduler, executed in order, and as late as may be, by a fake device."""

import pytest

from jaxrunner.caches.cache_group import has_checkpoints
from jaxrunner.caches.window import SlidingWindow
from tests.support.loads import LOADS, QUICK
from tests.support.random_driver import Driver

NUM_STEPS = 1200  # of a load


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LOADS],
)
def test_any_load_computes_what_each_request_would_alone(name):
    load, part = LOADS[name], 1 if name in QUICK else 2
    driver = Driver(load, seed=1, num_steps=NUM_STEPS // part)
    driver.run()
    assert not driver.requests and not driver.scheduler.running
    assert all(pool.num_free == pool.num_blocks for pool in driver.pools)
    # Everything that can go wrong was tried.
    seen = driver.seen
    seen["preempted"], seen["no-op"] = driver.scheduler.num_preemptions, driver.device.num_no_ops
    least = dict(steps=NUM_STEPS, preempted=10, stop=20, length=40, abort=20, resets=3)
    if load.depth > 1:
        least |= {"late": 10, "late end": 1, "no-op": 20}
    if load.num_steps > 1:
        least |= {"several": 40}
    if load.num_drafts:
        seen["accepted"], seen["rejected"] = driver.device.num_accepted, driver.device.num_rejected
        least |= {"accepted": 80, "rejected": 40}
    if driver.remote is not None:
        seen |= driver.remote.seen
        least |= {"loaded": 40, "failed": 10, "unknown": 40, "given up": 1, "sent": 40}
    if load.caching:
        least |= {"hits": 8} | ({"copies": 2} if load.has_copies else {})
    if any(has_checkpoints([group.kind]) for group in load.groups):
        seen["handed on"] = driver.device.num_handed_on
        least = least | {"handed on": 40, "checkpoints": 40, "hits": 4} if load.caching else least
    if any(isinstance(group.kind, SlidingWindow) for group in load.groups):
        least["windowed"] = NUM_STEPS
    assert not {key: seen[key] for key, n in least.items() if seen[key] < max(n // part, 1)}
    assert load.caching or load.remote or not seen["hits"]


def test_ten_thousand_steps_over_keys_windows_and_states():
    """After which every block and every state is free, and was nobody's but its users'."""
    driver = Driver(LOADS["states, windows, steps"], seed=2, num_steps=10_000)
    driver.run()
    assert not driver.requests and driver.scheduler.num_preemptions > 100
    assert all(pool.num_free == pool.num_blocks for pool in driver.pools)
    least = dict(hits=200, checkpoints=1000, windowed=1000, several=100, resets=20, length=400)
    assert not {key: driver.seen[key] for key, n in least.items() if driver.seen[key] < n}
