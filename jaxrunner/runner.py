"""Turns a scheduler's output into device calls and back. Knows no queues.

    handle = runner.step(scheduler_output)  # one upload, one launch; returns at once
    output = handle.get()                   # waits for the download

`execute_model` then `sample_tokens(grammar_output)` do the same in two launches, for a host that
builds a grammar mask while the forward pass runs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrunner.buckets import choose, step_buckets
from jaxrunner.config import EngineConfig, ModelConfig
from jaxrunner.kernels_pallas import reference
from jaxrunner.launch import abstract, program_keys, program_spec
from jaxrunner.layout import Program, make_state
from jaxrunner.model import Model
from jaxrunner.programs import Key, Programs
from jaxrunner.request import SchedulerOutput
from jaxrunner.sampling import RULES
from jaxrunner.slots import Slots


class GrammarOutput(NamedTuple):
    """Which tokens a grammar allows, for some requests of a step."""

    req_ids: tuple[str, ...]
    bitmask: np.ndarray  # [requests, ceil(V / 32)], int32; token t is bit t % 32 of word t // 32


@dataclass(frozen=True)
class ModelRunnerOutput:
    """What a step sampled, in row order."""

    req_ids: tuple[str, ...] = ()
    sampled_token_ids: tuple[list[int], ...] = ()  # [] for a request in mid-prefill
    finished: tuple[bool, ...] = ()  # ended on the device


class StepHandle:
    """A step in flight."""

    def __init__(self, req_ids: tuple[str, ...] = (), packed: jax.Array | None = None):
        self.req_ids, self._packed = req_ids, packed
        if packed is not None:
            packed.copy_to_host_async()

    def get(self) -> ModelRunnerOutput:
        """Waits for the step and returns what it sampled."""
        if self._packed is None:
            return ModelRunnerOutput()
        rows = np.asarray(self._packed)[: len(self.req_ids)].tolist()
        tokens = tuple(row[: row[-2]] for row in rows)
        return ModelRunnerOutput(self.req_ids, tokens, tuple(row[-1] == 1 for row in rows))


class ModelRunner:
    """Owns the device state and the programs of one model."""

    def __init__(
        self,
        model: Model,
        model_config: ModelConfig,
        config: EngineConfig,
        params: Any,
        *,
        attention=reference.paged_attention,
        rules=RULES,
    ):
        self.params = params
        self.program = Program(model, model_config, config, attention, rules)
        self.state = make_state(self.program)
        self.buckets = step_buckets(config, 1 + self.program.num_drafts)
        self.slots = Slots(self.program)
        shapes = abstract(params)
        self.programs = Programs(lambda key: program_spec(self.program, shapes, key))
        self._forwarded: tuple[Any, ...] | None = None

    def warm_up(self, *, two_phase: bool = False, progress: bool = False) -> None:
        """Compiles every program that `step`, or also the two-phase path, can need."""
        keys = program_keys(self.program, self.buckets, two_phase=two_phase)
        self.programs.warm_up(keys, progress=progress)

    def step(self, scheduler_output: SchedulerOutput) -> StepHandle:
        """Applies the scheduler's changes, computes its tokens and samples, in one launch."""
        req_ids, bucket, plan = self._prepare(scheduler_output)
        if not req_ids:
            return StepHandle()
        program = self.programs[Key("step", bucket)]
        self.state, packed = program(self.params, self.state, plan)
        return StepHandle(req_ids, packed)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Starts the forward pass of a step; `sample_tokens` must follow.

        Raises:
          RuntimeError: the step before was not sampled.
        """
        if self._forwarded is not None:
            raise RuntimeError("execute_model was called twice: call sample_tokens in between")
        req_ids, bucket, plan = self._prepare(scheduler_output)
        if req_ids:
            program = self.programs[Key("forward", bucket)]
            self.state, batch, logits = program(self.params, self.state, plan)
            self._forwarded = req_ids, bucket, plan, batch, logits

    def sample_tokens(self, grammar_output: GrammarOutput | None = None) -> StepHandle:
        """Samples the step that `execute_model` started; an empty step where it had no tokens.

        Raises:
          ValueError: the grammar names a request that is not in the step.
        """
        if self._forwarded is None:
            return StepHandle()
        req_ids, bucket, plan, batch, logits = self._forwarded
        words = -(-self.program.config.vocab_size // 32)
        mask = np.full((bucket.num_rows, words), -1, np.int32)
        for req_id, allowed in zip(*(grammar_output or ((), ())), strict=True):
            if req_id not in req_ids:
                raise ValueError(f"grammar_output must name requests of the step, got {req_id!r}")
            mask[req_ids.index(req_id)] = allowed
        self._forwarded = None
        program = self.programs[Key("sample", bucket)]
        self.state, packed = program(logits, self.state, plan, batch, mask)
        return StepHandle(req_ids, packed)

    def _prepare(self, output: SchedulerOutput):
        """Updates the tables. Returns the step's requests in row order, its bucket and plan."""
        for req_id in output.finished_req_ids | output.preempted_req_ids:
            self.slots.remove(req_id)
        new, counts = output.scheduled_new_reqs, output.num_scheduled_tokens
        for request in new:
            self.slots.add(request)
        blocks = self.slots.append_blocks(output.new_block_ids)
        none: tuple[list, ...] = tuple([] for _ in blocks)
        req_ids = tuple(sorted(counts, key=counts.__getitem__))  # decodes first; stable
        if not req_ids:
            self._admit(new, blocks)
            return req_ids, None, None
        sizes = [counts[r] for r in req_ids]
        bucket = choose(self.buckets, sizes, self.slots.all_greedy(req_ids))
        # A step's own tokens never need more blocks than its plan holds; foresight may.
        fits = self.slots.room(blocks, bucket)
        self._admit(new, none if fits else blocks)
        return req_ids, bucket, self.slots.plan(req_ids, counts, blocks if fits else none, bucket)

    def _admit(self, new, blocks) -> None:
        """Writes new requests into the device's tables, in as many launches as it takes."""
        for size, packed in self.slots.admissions(new, blocks):
            self.state = self.programs[Key("admit", size)](self.state, packed)
