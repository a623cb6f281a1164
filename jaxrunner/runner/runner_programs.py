"""The programs of a runner, which are compiled before requests come."""

from collections.abc import Sequence
import gc
from typing import Any

import jax

from jaxrunner.device.buckets import choose
from jaxrunner.device.entry_points import ENTRY_POINTS
from jaxrunner.device.program_spec import program_keys, step_key
from jaxrunner.program.bucket import Bucket
from jaxrunner.programs.make_programs import in_order
from jaxrunner.programs.program_table import Key, ProgramTable, Started
from jaxrunner.runner.runner_weights import RunnerWeights


class RunnerPrograms(RunnerWeights):
    """The part of `ModelRunner` that warms programs up."""

    programs: ProgramTable
    buckets: Sequence[Bucket]
    state: Any  # of the device; programs replace it

    def prepare(self, *, all_rules: bool = False, background: bool = False) -> Started:
        """Starts to compile the programs that `warm_up` waits for; weights are not needed yet."""
        if self.program.engine.enforce_eager:
            return {}
        keys = program_keys(self.program, self.buckets, all_rules=all_rules)
        if not background:
            return self.programs.start(keys, keys)
        return self.programs.start(*in_order(self.program, self.buckets, keys))

    def warm_up(
        self, *, all_rules: bool = False, background: bool = False, progress: bool = False
    ) -> None:
        """Compiles the programs of usual requests, with `all_rules` those of all requests.

        background: returns once the largest size is compiled, at which any step can run; threads
            compile the others beside the steps, which makes both slower meanwhile.
        """
        if self.program.engine.enforce_eager:
            return
        started = self.prepare(all_rules=all_rules, background=background)
        self.programs.wait(started, progress=progress)
        jax.block_until_ready(self.state)  # allocated now, not by the first request
        for key in self.programs.ready():
            if ENTRY_POINTS[key.name].is_rehearsed(key.size):
                self._rehearse(key)
        jax.block_until_ready(self.state)
        if self.adapters is not None:
            self.adapters.warm_up()
        gc.collect()  # now: the next full collection, which would delay a step, is then far off

    def _rehearse(self, key: Key) -> None:
        """Runs a program without requests, as the first run is slow: it sets up a CUDA graph."""
        none: tuple[list, ...] = tuple([] for _ in self.program.cache_groups)
        plan = self.requests.plan((), (), none, key.size)
        self.state, *_ = self.programs[key](self.params_of(key.size), self.state, plan)

    def would_wait(self, num_rows: int, num_drafts: int, num_steps: int) -> bool:
        """Whether decode steps of these sizes would wait for a program that is being compiled."""
        if not (pending := self.programs.is_pending)():
            return False
        bucket = choose(self.buckets, [1 + num_drafts] * num_rows, num_drafts=num_drafts)
        return any(pending(step_key(bucket, n)) for n in {1, num_steps})
