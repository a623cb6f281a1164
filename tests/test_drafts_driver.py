"""Random loads on an engine that drafts: each request ends as in an engine without drafts."""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.models.llama import llama
from jaxrunner.scheduling import draft_policy
from jaxrunner.scheduling.request import Request
from jaxrunner.speculators.drafter import Drafted
from tests.outside.lookup import lookup
from tests.support import features, tiny
from tests.support.compilations import compilations
from tests.support.drafters import DRAFTERS, joined, with_itself_or_none, with_ngrams

MAX_LEN = 48
EOS = (features.EOS,)


def with_lookup():
    """Returns the tiny model with a speculator of a user's, which keeps state of its own."""
    return llama._replace(speculator=lookup), *tiny.model_and_params()


KINDS = DRAFTERS | dict(ngram=with_ngrams, user=with_lookup, adaptive=with_itself_or_none)


@dataclass(frozen=True)
class Load:
    """What drafts, the sizes of its engine, and how many steps it runs."""

    drafter: str
    num_steps: int = 350
    sizes: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    most_logprobs: int = 4  # of a request; from 2 on its programs are others, and wider


TINY_POOL = dict(num_blocks=14, policy="priority")
LOADS = {
    "eagle3": Load("eagle3", 200, TINY_POOL | dict(async_depth=2), most_logprobs=1),
    "adaptive": Load("adaptive", sizes=TINY_POOL | dict(num_decode_steps=2, async_depth=2)),
    "another, steps": Load(
        "another",
        sizes=TINY_POOL | dict(num_decode_steps=4, async_depth=3),
        seed=1,
        most_logprobs=1,
    ),
    "n-grams": Load("ngram", sizes=TINY_POOL | dict(async_depth=2)),
    "a user's": Load("user", sizes=dict(num_blocks=16, async_depth=3)),
}


class Driver:
    """Adds, forks, aborts, saves, sleeps and takes new weights at random."""

    def __init__(self, load: Load, folder, seed: int = 0):
        self.rng, self.folder, self.seen = np.random.default_rng(seed), folder, Counter()
        self.model, self.config, params = KINDS[load.drafter]()
        self.sizes, self.most = tiny.engine_config(**load.sizes), load.most_logprobs
        self.engine = self.make(params)
        config, target = tiny.model_and_params()
        self.plain = Engine(  # of the usual sizes, which other tests compile too
            llama, config, tiny.engine_config(), target, make_compiler=features.ParityCompiler
        )
        self.live: dict[str, Request] = {}
        self.ended: list[Request] = []
        self.bases = [self.tokens(n) for n in (9, 14, 23)]
        self.num_added = 0

    def make(self, params: Any) -> Engine:
        """Returns an engine that drafts, with weights `params`."""
        return Engine(
            self.model, self.config, self.sizes, params, make_compiler=features.ParityCompiler
        )

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(0, 9, n).tolist()

    def params(self) -> SamplingParams:
        """Returns those of short requests, or of such that end where the model does."""
        fixed: dict[str, Any] = dict(seed=int(self.rng.integers(2**40)))
        if self.rng.random() < 0.5:
            temperature = float(self.rng.choice([0, 0.5]))
            fixed |= {} if fixed["seed"] % 5 else dict(structured_outputs=features.GRAMMAR)
            return SamplingParams(temperature=temperature, max_tokens=MAX_LEN, **fixed)
        params = features.random_params(self.rng, **fixed)
        numbers = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
        asked = {name: min(n, self.most) for name, n in numbers.items() if n is not None}
        ids = (params.logprob_token_ids or [])[: self.most] or None
        return replace(params, logprob_token_ids=ids, **asked)

    def add(self) -> None:
        """Adds a request, half of them with a known beginning; some are two of one prompt."""
        base = self.bases[self.rng.integers(3)][: int(self.rng.integers(1, 24))]
        prompt = base + self.tokens(int(self.rng.integers(1, 9)))
        params, first, twice = self.params(), None, self.rng.random() < 0.2
        room = MAX_LEN - len(prompt)
        if params.max_tokens is None or params.max_tokens > room:
            self.seen["to the model's end"] += 1
            params = SamplingParams(
                temperature=params.temperature, seed=params.seed, logprobs=1, max_tokens=room,
                structured_outputs=params.structured_outputs,
            )  # fmt: skip
        for _ in range(1 + twice):
            name, self.num_added = str(self.num_added), self.num_added + 1
            first = self.live[name] = self.engine.add(
                name, prompt, params, eos_token_ids=EOS, prefix_from=first,
                priority=int(self.rng.integers(3)),
            )  # fmt: skip
            self.seen["forks"] += twice

    def step(self) -> None:
        """Steps once, and keeps what has ended for `judge`."""
        self.engine.step()
        self.seen["steps"] += 1
        self.collect()

    def collect(self) -> None:
        done = [name for name, r in self.live.items() if r.finish_reason is not None]
        self.ended += [self.live.pop(name) for name in done]

    def drain(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def disturb(self) -> None:
        """Does to the engine, now and then, what must change no token."""
        one = self.rng.random()
        if one < 0.03 and self.live:
            name = str(self.rng.choice(sorted(self.live)))
            self.engine.abort([name])
            self.collect()
        elif one < 0.04:
            self.update_drafter()
        elif one < 0.046:
            self.move()
        elif one < 0.052:
            self.drain()
            self.engine.step()  # tells the device of what has ended
            self.sleep() if self.seen["sleeps"] < self.seen["weights"] else self.update_all()

    def update_drafter(self) -> None:
        """Gives the drafter other weights while requests are at work."""
        params = self.engine.runner.params
        if isinstance(params, Drafted):
            # What is random stays: the map of a smaller vocabulary is none of its weights.
            flipped = jax.tree.map(lambda x: -x if x.dtype == "float32" else x, params.drafter)
            self.engine.update_params(Drafted(params.target, flipped))
            self.seen["drafters"] += 1

    def update_all(self) -> None:
        """Gives both engines other weights of the model."""
        self.judge()
        self.seen["weights"] += 1
        weights = tiny.random_params(tiny.config(), seed=self.seen["weights"])
        params = self.engine.runner.params
        drafted = isinstance(params, Drafted)
        self.engine.update_params(Drafted(weights, params.drafter) if drafted else weights)
        self.plain.update_params(weights)

    def move(self) -> None:
        """Goes on with what was saved, in another engine."""
        self.seen["moves"] += 1
        folder = self.folder / str(self.seen["moves"])
        save_engine(self.engine, folder)
        self.collect()
        preempted = self.engine.scheduler.num_preemptions
        self.engine, old = self.make(self.engine.runner.params), self.engine
        restored, _ = restore_engine(self.engine, folder)
        assert restored.keys() == self.live.keys()
        assert self.engine.scheduler.num_preemptions == preempted
        self.live = dict(restored)
        del old

    def sleep(self) -> None:
        self.seen["sleeps"] += 1
        self.engine.worker.sleep(1)
        self.engine.worker.wake_up()

    def judge(self) -> None:
        """Compares what has ended with the engine without drafts."""
        pairs = []
        for r in self.ended:
            self.seen[str(r.finish_reason)] += 1
            self.seen["hits"] += r.num_cached_tokens > 0
            name = f"plain {r.request_id}"
            other = self.plain.add(name, r.prompt_token_ids, r.params, eos_token_ids=EOS)
            pairs.append((r, other))
        while self.plain.has_unfinished:
            self.plain.step()
        for got, want in pairs:
            compare(got, want)
            if got.draft_counts:
                self.seen["drafted"] += got.draft_counts[0]
                self.seen["accepted"] += sum(got.draft_counts[2:])
                ruled = got.params.structured_outputs is not None
                self.seen["drafted, grammar"] += got.draft_counts[0] if ruled else 0
        self.ended = []

    def run(self, num_steps: int) -> None:
        while self.seen["steps"] < num_steps:
            if self.engine.scheduler.num_waiting < 3 and self.rng.random() < 0.4:
                self.add()
            self.disturb()
            self.step()
        self.drain()
        self.judge()


def compare(got: Request, want: Request) -> None:
    """Checks that a request ended as another: what was aborted, as far as it went."""
    n, tokens = len(got.output_token_ids), want.output_token_ids
    if got.finish_reason != "abort":
        assert (got.finish_reason, got.stop_reason) == (want.finish_reason, want.stop_reason)
        assert n == len(tokens)
    assert got.output_token_ids == tokens[:n], (got.request_id, got.params)
    ours, theirs = (joined(r.logprobs, r.params) for r in (got, want))
    assert len(ours) == len(theirs) or not n
    for x, y in zip(ours, theirs, strict=n > 0):
        assert len(x) == n
        np.testing.assert_allclose(x, y[:n], atol=2e-5)
    if got.finish_reason != "abort":
        ours, theirs = (by_position(r.prompt_logprobs, r.params) for r in (got, want))
        assert ours.keys() == theirs.keys()
        for position, row in ours.items():
            np.testing.assert_allclose(row, theirs[position], atol=2e-5)


def by_position(parts: list[Any], params: SamplingParams) -> dict[int, np.ndarray]:
    """Returns all numbers of each prompt token with logprobs, in one row."""
    rows, asked = {}, params.prompt_logprobs or 0
    for positions, logprobs in parts:
        arrays = [x[:, :asked] if x.ndim > 1 else x[:, None] for x in jax.tree.leaves(logprobs)]
        rows |= dict(zip(positions.tolist(), np.concatenate(arrays, 1), strict=True))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_any_load_ends_as_without_drafts(name, tmp_path, monkeypatch, drive_steps):
    load = LOADS[name]
    monkeypatch.setattr(draft_policy, "PERIOD", 9)  # drafts come and go
    driver, num_steps = Driver(load, tmp_path, load.seed), max(load.num_steps, drive_steps)
    driver.run(num_steps)
    seen, scale = driver.seen, num_steps / 1000
    if name == "adaptive":
        scale /= 5  # what it drafts depends on time, and so all that is random
    seen["preempted"] = driver.engine.scheduler.num_preemptions
    least = dict(
        steps=1000, length=60, stop=5, abort=12, hits=25, forks=30, moves=1, drafted=400,
        preempted=10 if load.sizes["num_blocks"] < 20 else 0, accepted=15, weights=1, sleeps=1,
    ) | {"to the model's end": 30, "drafted, grammar": 30}  # fmt: skip
    if isinstance(driver.engine.runner.params, Drafted):
        least["drafters"] = 3
    assert not {key: seen[key] for key, n in least.items() if seen[key] < int(n * scale)}, seen


@pytest.mark.slow
def test_no_request_compiles_anything_after_warm_up():
    """Of programs that the adaptive load has lowered: those of all drafts, and more."""
    model, config, params = KINDS["adaptive"]()
    sizes = tiny.engine_config(**LOADS["adaptive"].sizes)
    e = Engine(model, config, sizes, params, make_compiler=features.ParityCompiler)
    e.warm_up(all_rules=True)
    programs, rng = e.runner.programs, np.random.default_rng(0)
    warm, programs.strict = len(programs.ledger), True
    with compilations() as compiled:
        for i in range(60):
            usual = SamplingParams(temperature=float(i % 4 == 0), max_tokens=12, seed=i)
            given = usual if i % 2 else features.random_params(rng)
            prompt = rng.integers(0, 9, rng.integers(1, 30)).tolist()
            e.add(f"{i}", prompt, given, priority=int(rng.integers(3)))
            e.step()
            if i % 20 == 3:
                e.abort([f"{i}"])
        while e.has_unfinished:
            e.step()
    assert (compiled, len(programs.ledger)) == ([], warm) and e.scheduler.num_preemptions
