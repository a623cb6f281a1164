"""Launches a scheduler's steps on the device, and hands out their outputs. Knows no queues.

    handle = runner.step(scheduler_output)  # one upload, one launch; does not wait for them
    output = handle.get()                   # waits for the download

`execute_model` then `sample_tokens(grammar_output)` do the same in two launches, for a host that
builds a grammar mask while the forward pass runs.
"""

from collections import Counter
from collections.abc import Sequence
import contextlib
import copy
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxrunner import pytree
from jaxrunner.device.buckets import choose
from jaxrunner.device.packing import Layout
from jaxrunner.device.program_spec import step_key
from jaxrunner.loading import orbax_io
from jaxrunner.lora.device_adapters import device_adapters
from jaxrunner.parallel.placement import place
from jaxrunner.parallel.stages import PipelineState, is_last
from jaxrunner.program.bucket import MultiStepBucket, SampleSize
from jaxrunner.program.shapes import output_spec
from jaxrunner.program.state import make_state
from jaxrunner.programs.build import Built
from jaxrunner.programs.make_programs import make_programs
from jaxrunner.programs.program_table import Key
from jaxrunner.ranks.outputs import output_layout
from jaxrunner.ranks.requests import make_requests
from jaxrunner.runner.at_exit import awaited_at_exit
from jaxrunner.runner.grammar_masks import GrammarMasks
from jaxrunner.runner.phases import phase
from jaxrunner.runner.profiling import Profiler
from jaxrunner.runner.prompt_scores import launch_scores
from jaxrunner.runner.request_table import Write
from jaxrunner.runner.runner_programs import RunnerPrograms
from jaxrunner.runner.step_check import StepCheck
from jaxrunner.runner.step_handle import StepHandle, Work
from jaxrunner.scheduling.request import GrammarOutput, NewRequest, SchedulerOutput


class ModelRunner(RunnerPrograms):
    """Owns the device state and the programs of one model."""

    def __init__(self, built: Built, params: Any, *, trusted: bool = False):
        """built: what `build` returns.
        params: the weights, or their abstract arrays if `update_params` brings them before the
            first step.
        trusted: steps come from our own scheduler, and are not checked.
        """
        params = place(params, built.params)  # arrays on the host would be copied in every step
        to_come = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params))
        self.choice, self.program = built.choice, built.program
        self.params = None if to_come else params
        self.buckets = built.buckets
        self.requests, self.adapters = make_requests(self.program), device_adapters(self.program)
        self._check = None if trusted else StepCheck(self.program, self.adapters)
        self.params_spec = orbax_io.abstract(params)  # shapes that new weights must have
        # Programs do not refer to the runner, so the device state is freed with the runner.
        self.programs = make_programs(built)
        # Number of steps by their tokens, for each `query_len`; read by `bucket_planner`.
        self.traffic: dict[int, Counter[int]] = {b.query_len: Counter() for b in self.buckets}
        self.profiler = Profiler()
        self._closed = False
        self._forwarded: tuple[Any, ...] | None = None
        self._masks = GrammarMasks(built.program)
        self._layout = functools.cache(
            lambda *size: output_layout(built.program, output_spec(built.program, *size))
        )
        of_tokens = (head for head in built.program.model.heads if head.axes.startswith("T"))
        self._token_heads = tuple(head.name for head in of_tokens)
        awaited_at_exit(self)

    @property
    def state(self) -> Any:
        """The device state. Allocated when first used, after the programs are compiled, as XLA's
        autotuner needs buffers. Waits for a launch that is under way, and raises what that does."""
        self._settle()
        if "_state" not in vars(self):
            self._state = make_state(self.program)
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state

    def _settle(self) -> None:
        """Waits for a launch that is under way, and raises what that does, once."""
        if isinstance(state := vars(self).get("_state"), PipelineState):
            try:
                self._state = state.settled()
            except Exception:
                self._state = state.without_launch()
                raise

    def close(self) -> None:
        """Frees the device memory of the state."""
        self.programs.close()
        state, self._state = vars(self).get("_state"), None  # made when first used
        pytree.delete(state)
        if self.adapters is not None:
            self.adapters.sleep()
        self._closed = True

    def fork(self) -> "ModelRunner":
        """Returns an independent runner: state and requests are copied, all else is shared.

        Raises:
          RuntimeError: a step is started and not sampled, or the caches sleep.
        """
        if self._forwarded is not None or self.state is None:
            raise RuntimeError("to fork, call sample_tokens if a step waits, wake_up after a sleep")
        other = copy.copy(self)
        # Copied, as a step donates its state.
        other.state, other.requests = jax.tree.map(jnp.copy, self.state), self.requests.copy()
        other._check = self._check and self._check.copy()
        other.adapters = self.adapters and self.adapters.copy()
        other.connect()
        awaited_at_exit(other)
        return other

    def restart(self) -> None:
        """Forgets all requests after a failed step; makes a new state if it consumed the old."""
        self.requests, self._forwarded = make_requests(self.program), None
        self._check = self._check and StepCheck(self.program, self.adapters)
        self.connect()
        with contextlib.suppress(Exception):  # of a launch, which may have consumed it
            self._settle()
        if not pytree.is_alive(self.state):
            pytree.delete(self.state)
            # Waits, as the error of a failed device would otherwise come later.
            self.state = jax.block_until_ready(make_state(self.program))

    def step(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Updates the slots, computes the scheduled tokens and samples; does not wait.

        Takes one launch, or two where a request has logprobs or rules that few requests have.

        Raises:
          TypeError, ValueError: the step is invalid; names the field, and nothing changes.
          RuntimeError: the step before was not sampled, no slot is free, or the runner is closed.
        """
        self._begin(scheduler_output)
        with self.profiler.step(scheduler_output):
            return self._step(scheduler_output)

    def _begin(self, scheduler_output: SchedulerOutput, *, in_two: bool = False) -> None:
        """Checks a step before anything changes; raises as `step`."""
        if self._closed:
            raise RuntimeError("this runner is closed: build another one")
        if self._forwarded is not None:
            raise RuntimeError("execute_model has begun a step: call sample_tokens first")
        if self._check is not None:
            self._check.take(scheduler_output, in_two=in_two)

    def _step(self, scheduler_output: SchedulerOutput) -> StepHandle:
        work = self._prepare(scheduler_output)
        if work is None:
            return StepHandle()
        size, num_steps = work.bucket, scheduler_output.num_steps
        if num_steps == 1 and (work.size.all_rules or work.num_targets):
            self._forward(work)
            return self.sample_tokens()
        program = self.programs[Key("multi_step" if num_steps > 1 else "step", size)]
        self.state, packed = program(self.params_of(size), self.state, work.plan)
        layout = self._output(work.size, num_steps, size)
        return StepHandle(work.req_ids, layout, packed, work.counts, self._token_heads)

    def _output(self, size: SampleSize, num_steps: int, bucket: Any) -> Layout:
        """Returns the layout of a packed output; it depends on tokens if a head has a T axis."""
        return self._layout(size, num_steps, bucket.num_tokens if self._token_heads else 0)

    def execute_model(self, scheduler_output: SchedulerOutput, *x: Any) -> jax.Array | None:
        """Launches the forward pass of a single step; `sample_tokens` must follow.

        x: hidden states, [T, E], of the previous stage, if another worker runs that. Returns hidden
        states for the next stage, if another worker runs that. Raises as `step`.
        """
        self._begin(scheduler_output, in_two=True)
        with self.profiler.step(scheduler_output):
            work = self._prepare(scheduler_output)
            hidden = None if work is None else self._forward(work, *x)
        return None if is_last(self.program.config) else hidden

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> StepHandle:
        """Samples the step that `execute_model` launched; returns an empty one if it had no tokens.

        Raises:
          TypeError, ValueError: the grammar output is invalid; the step can still be sampled.
        """
        if self._forwarded is None:
            return StepHandle()
        work, logits, rows, hidden, heads, kept, scores = self._forwarded
        size = work.size if grammar_output is None else work.size._replace(all_rules=True)
        mask = self._masks.of(work.req_ids, size, grammar_output) if size.all_rules else None
        self._forwarded = None
        program = self.programs[Key("sample", size)]
        tables, packed = program(logits, replace(self.state, kv=()), rows, mask, heads)
        self.state = replace(tables, kv=self.state.kv)
        drafts = None
        if kept is not None:
            batch, extras = kept
            program = self.programs[Key("propose", work.bucket)]
            params = self.params_of(work.bucket)
            self.state, drafts = program(params, self.state, batch, rows, hidden, extras)
        layout = self._output(size, 1, work.bucket)
        handle = StepHandle(work.req_ids, layout, packed, work.counts, self._token_heads)
        if grammar_output is not None and drafts is not None:
            handle.expect_drafts(drafts)
        if scores:
            handle.expect_scores({self.requests[r]: r for r in work.req_ids if r}, scores)
        return handle

    def _forward(self, work: Work, *x: Any) -> jax.Array:
        """Launches the forward pass and prompt logprobs. Returns hidden states, [T, E]."""
        program = self.programs[Key("forward", work.bucket)]
        out = program(self.params_of(work.bucket), self.state, work.plan, *x)
        self.state, logits, rows, hidden, targets, heads, kept = out
        tables = replace(self.state, kv=())
        params = self.params_of(work.bucket) if self.program.saved else self._flat
        scores = launch_scores(self.program, self.programs, params, tables, hidden, targets, work)
        self._forwarded = work, logits, rows, hidden, heads, kept, scores
        return hidden

    @phase("pack")
    def _prepare(self, output: SchedulerOutput) -> Work | None:
        """Updates the slots. Returns the step's work, None where there is no token to compute."""
        # Sorted, so that all processes of a mesh hand out freed slots in the same order.
        for req_id in sorted(output.finished_req_ids | output.preempted_req_ids):
            self.requests.remove(req_id)
        new, counts = output.scheduled_new_reqs, output.num_scheduled_tokens
        for request in new:
            self.requests.add(request)
        engine = self.program.engine
        lora = self._admit_adapters(new, counts) or (engine.batch_invariant and engine.enable_lora)
        blocks = self.requests.append_blocks(output.new_block_ids)
        none: tuple[list, ...] = tuple([] for _ in blocks)
        req_ids = tuple(sorted(counts, key=counts.__getitem__))  # stable: decodes come first
        if not req_ids:
            self._admit(new, blocks)
            return None
        n, drafts, is_pending = output.num_steps, output.num_drafts, self.programs.is_pending
        several = n > 1
        each = [1 + drafts.get(r, 0) if several else counts[r] for r in req_ids]
        own, *others = self.requests.of_ranks(req_ids, each)
        bucket = choose(
            self.buckets, own, lambda b: is_pending(step_key(b, n)), several=several,
            num_drafts=output.num_proposed, lora=lora, others=others,
            ragged=output.replays_routes, short=self.requests.are_short(req_ids),
        )  # fmt: skip
        self.traffic[bucket.query_len][sum(each)] += 1
        sample = self.requests.sample_size(req_ids, bucket)
        if several:
            bucket = MultiStepBucket(n, sample, lora, bucket.short)
        # Blocks of a step's own tokens always fit into its plan; blocks allocated ahead may not.
        fits = self.requests.room(blocks, bucket)
        if new or not fits:
            self._admit(new, none if fits else blocks)
        plan = self.requests.plan(req_ids, each, blocks if fits else none, bucket)
        ids = self.requests.rows(req_ids, bucket.num_rows)
        return Work(ids, bucket, plan, sample, *self.requests.count_targets(counts), tuple(each))

    @phase("admit")
    def _admit(self, new: list[NewRequest], blocks: Sequence[list[Write]]) -> None:
        """Launches the admissions that write new requests into the device's tables."""
        for size, packed in self.requests.admissions(new, blocks):
            tables = self.programs[Key("admit", size)](replace(self.state, kv=()), packed)
            self.state = replace(tables, kv=self.state.kv)
        for size, packed in self.requests.copies(new):
            self.state = self.programs[Key("copy", size)](self.state, packed)
