"""The planner finds the best sizes there are."""

import itertools

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.buckets import GPU_SIZES, powers
from jaxrunner.runner.bucket_planner import interpolate, plan
from tests.support.tiny_engine import PROMPTS, engine, run

# Milliseconds of a decode step of Llama-3-8B's shape on an H200, by batch size (benchmarks).
H200 = {8: 4.75, 32: 5.78, 64: 7.20, 128: 10.03, 256: 16.94}


def cost(sizes, steps, seconds) -> float:
    """Returns the time of all steps, each at the first size that holds it."""
    return sum(n * seconds(min(s for s in sizes if s >= size)) for size, n in steps.items())


@pytest.mark.parametrize("num_buckets", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("seed", range(4))
def test_no_other_sizes_take_less(num_buckets: int, seed: int):
    rng = np.random.default_rng(seed)
    sizes = sorted(rng.choice(200, 8, replace=False) + 1)
    steps = {int(size): int(rng.integers(1, 50)) for size in sizes}
    times = np.cumsum(rng.random(8)) * rng.integers(0, 2, 8).cumsum()
    seconds = dict(zip(steps, times.tolist(), strict=True)).__getitem__
    got = plan(steps, seconds, num_buckets)
    assert got.seconds == pytest.approx(cost(got.sizes, steps, seconds))
    assert len(got.sizes) <= num_buckets and got.sizes[-1] == sizes[-1]
    others = itertools.combinations(sizes[:-1], min(num_buckets, 8) - 1)
    best = min(cost((*some, sizes[-1]), steps, seconds) for some in others)
    assert got.seconds == pytest.approx(best)


def test_the_default_of_a_gpu_is_near_the_best_for_even_traffic():
    """By the times of an H200, for 1 to 256 requests alike; besides the one for a single row."""
    steps, seconds = dict.fromkeys(range(1, 257), 1), interpolate(H200)
    default, best = [size for size in GPU_SIZES if 1 < size <= 256], plan(steps, seconds, 6)
    assert len(default) == len(best.sizes) == 6
    lost = [cost(sizes, steps, seconds) / best.seconds for sizes in (default, powers(8, 256))]
    assert 1 <= lost[0] < 1.03 and lost[1] > 1.1


def test_times_are_linear_between_and_beyond():
    at = interpolate({10: 1.0, 20: 3.0, 40: 4.0})
    assert [at(n) for n in (5, 10, 15, 30, 60)] == [0.0, 1.0, 2.0, 3.5, 5.0]


def test_what_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match="plan wants steps and buckets, got 0 and 3"):
        plan({}, float, 3)
    with pytest.raises(ValueError, match="a step of 2 must not take less than one of 1"):
        plan({1: 1, 2: 1}, lambda size: -float(size), 1)
    with pytest.raises(ValueError, match="times must be of at least 2 sizes, got 1"):
        interpolate({1: 1.0})


def test_a_runner_counts_its_traffic():
    """Steps by their tokens: those of decodes alone under 1, others under 0."""
    e = engine()
    run(e, PROMPTS[:3], [SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)] * 3)
    traffic = e.runner.traffic
    assert traffic[1] == {3: 3} and sum(traffic[0].values()) == 1
    assert sum(traffic[0]) == sum(map(len, PROMPTS[:3]))
