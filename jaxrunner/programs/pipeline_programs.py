"""The programs of a pipeline behind the interface of one model's: launches them stage by stage.

Hidden states go from device to device, and so do the tokens that the last stage samples. Each other
stage writes these into its requests (`receive`) just before its next step of one of them. Steps of
other requests are launched in between, and wait for no token. A thread launches the last stage, so
that the host plans the next step meanwhile.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from jaxrunner.device.packing import Layout
from jaxrunner.device.program_key import Key
from jaxrunner.parallel.stage_link import Post, StageLink, links_of
from jaxrunner.parallel.stages import (
    Outcome,
    PipelineState,
    Returned,
    Sampled,
    is_last,
    is_spread,
    rank_of,
)
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import output_spec
from jaxrunner.programs.launch_thread import Launched, LaunchThread
from jaxrunner.programs.program_table import ProgramTable
from jaxrunner.programs.stage_tables import StageTables


class PipelinePrograms(StageTables):
    """The programs of the stages in this process, with `ProgramTable`'s interface."""

    def __init__(self, program: Program, tables: Sequence[ProgramTable]):
        """tables: of `program.stages`."""
        ends = is_last(program.stages[-1].config)
        has_all = ends and rank_of(program.stages[0].config) == 0
        super().__init__(tables, last=tables[-1] if ends else None, has_all=has_all)
        self._program, self._R = program, program.dims["R"]
        self._before = tables[:-1] if ends else tables
        self._at = [
            NamedSharding(stage.mesh, PartitionSpec()) for stage in program.stages if stage.mesh
        ]
        # With stages in other processes: links for hidden states, and broadcasts of tokens.
        self._came: StageLink | None = None
        self._goes: StageLink | None = None
        self._post: Post | None = None
        if is_spread(program.config):
            self._came, self._goes = links_of(program.config)
            last: Any = program.config
            self._post = Post(last.shards[-1].mesh.devices.flat[0].process_index)
        self._thread = LaunchThread() if has_all and self._before else None
        self._run: dict[str, Callable[..., Any]] = dict(
            step=self._step, forward=self._forward, sample=self._sample, admit=self._admit,
            propose=self._propose, copy=self._copy, prompt_logprobs=self._prompt_logprobs,
        )  # fmt: skip

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        """Returns a function that runs a program on all stages, each with its weights and state."""
        return functools.partial(self._run[key.name], key.size)

    def _stages(
        self, size: Any, params: Any, state: PipelineState, vector: np.ndarray, x: tuple
    ) -> tuple[PipelineState, tuple, Sampled]:
        """Launches the stages before the last. Returns the state, hidden states x, and the rows."""
        slots = tuple(vector[: size.num_rows].tolist())  # a plan's first leaf
        due = [step for step in state.sampled if self._meet(step.slots, slots)]
        if self._came is not None:
            for step in due if self._last else ():  # the first stage waits for their tokens too
                self._wait(step)
            x = (self._came.receive(*self._hidden(size.num_tokens)),)
        state, rows = replace(state, sampled=_without(state.sampled, due)), []
        for i, table in enumerate(self._before):
            part = state.part(i)
            for step in due:
                part = _receive(table, part, self._heard(step), i)
            part, out, row = table[Key("stage", size)](params[i], part, vector, *x)
            state, rows = state.put(i, part), [*rows, row]
            x = (jax.device_put(out, self._at[i + 1]) if i + 1 < len(self._at) else out,)
        if self._goes is not None:
            self._goes.send(*x)
        return state, x, Sampled(tuple(rows), (), slots)

    def _prepare_links(self, sizes: Iterable[int]) -> None:
        for link in filter(None, (self._came, self._goes)):
            for num_tokens in sorted(sizes):
                link.prepare(*self._hidden(num_tokens))

    def _hidden(self, num_tokens: int) -> tuple[tuple[int, int], Any]:
        """Returns the shape and dtype of hidden states between stages."""
        return (num_tokens, self._program.dims["E"]), jnp.dtype(self._program.engine.dtype)

    def _heard(self, step: Sampled) -> Sampled:
        """Returns a step with its tokens; waits for these if another process samples them."""
        if step.outcomes or step.told is None:
            return step
        tokens = Layout(output_spec(self._program, step.told[1])).read(self._wait(step)).token_ids
        return replace(step, outcomes=(Outcome(tokens, None, None),) * len(step.rows))

    def _wait(self, step: Sampled) -> np.ndarray:
        """Waits for the broadcast tokens of a step; raises as `Told.wait`."""
        return step.told[0].wait(self._program.engine.step_timeout_s)

    def _told(self, packed: jax.Array | None) -> Any:
        """Returns the packed output for the host, broadcast if there are several processes."""
        return packed if self._post is None else self._post.next(packed)

    def _awaits(self, state: PipelineState, rows: Sampled, size: SampleSize) -> tuple:
        """Returns the state that waits for tokens of another process, and their broadcast."""
        told = self._told(None)
        rows = rows if told is None else replace(rows, told=(told, size))
        return replace(state, sampled=(*state.sampled, rows)), told

    def _meet(self, slots: Iterable[int], others: Iterable[int]) -> bool:
        return not (set(slots) - {self._R}).isdisjoint(others)

    def _step(self, size: Any, params: Any, state: PipelineState, vector: np.ndarray):
        """Runs a whole step; returns the state and the packed `StepOutput`."""
        state, x, rows = self._stages(size, params, state, vector, ())
        if self._last is None:
            return self._awaits(state, rows, SampleSize(size.num_rows))
        run, part = self._last[Key("step", size)], state.part(-1)
        if self._thread is not None:
            launch = self._thread.submit(lambda: self._launch(run, params[-1], part, vector, x))
            state = replace(state, sampled=(*state.sampled, rows), launch=launch)
            return state, Launched(launch)
        part, packed, outcome = run(params[-1], part, vector, *x)
        told = self._told(packed), SampleSize(size.num_rows)
        return self._sent(state.put(-1, part), rows, outcome, told), told[0]

    def _launch(
        self, run: Callable[..., Any], params: Any, part: Any, vector: np.ndarray, x: tuple
    ) -> Returned:
        """Launches the last stage of a step, and the copies of what it samples."""
        part, packed, outcome = run(params, part, vector, *x)
        packed.copy_to_host_async()
        return Returned(part, packed, self._to_others(outcome))

    def _to_others(self, outcome: Outcome) -> tuple[Outcome, ...]:
        """Returns what the last stage sampled on the devices of each other stage."""
        return tuple(jax.device_put(outcome, at) for at in self._at[: len(self._before)])

    def _forward(
        self, size: Any, params: Any, state: PipelineState, vector: np.ndarray, *x: jax.Array
    ):
        """Runs the forward pass. x: hidden states of the stage before this process's.

        Returns as the entry point; without the last stage, hidden is x for the next stage.
        """
        x = tuple(jax.device_put(one, self._at[0]) for one in x)
        state, x, rows = self._stages(size, params, state, vector, x)
        if self._last is None:
            return state, None, (rows, None), x[0], None, {}, None
        part, logits, own, *rest = self._last[Key("forward", size)](
            params[-1], state.part(-1), vector, *x
        )
        return state.put(-1, part), logits, (rows, own), *rest

    def _sample(
        self, size: Any, logits: jax.Array, state: PipelineState, rows: Any, mask: Any, heads: Any
    ):
        """Samples on the last stage; in a process without it, waits for the tokens."""
        before, own = rows
        if self._last is None:
            return self._awaits(state, before, size)
        part, packed, outcome = self._last[Key("sample", size)](
            logits, state.part(-1), own, mask, heads
        )
        told = self._told(packed), size
        return self._sent(state.put(-1, part), before, outcome, told), told[0]

    def _propose(
        self, size: Any, params: Any, state: PipelineState, batch: Any, rows: Any, *args: Any
    ):
        """Drafts on the last stage, and sends the drafts with its tokens to the other stages."""
        assert self._last is not None, "a stage alone has no drafts"
        _, own = rows
        part, drafts = self._last[Key("propose", size)](
            params[-1], state.part(-1), batch, own, *args
        )
        state = state.put(-1, part)
        if self._before:
            *earlier, last = state.sampled
            outcomes = tuple(
                replace(of, drafts=jax.device_put(drafts, at))
                for of, at in zip(last.outcomes, self._at, strict=False)
            )
            state = replace(state, sampled=(*earlier, replace(last, outcomes=outcomes)))
        return state, drafts

    def _sent(
        self, state: PipelineState, rows: Sampled, outcome: Outcome, told: tuple[Any, SampleSize]
    ) -> PipelineState:
        """Returns the state with sampled tokens on their way to the stages before the last.

        told: the packed output for the host, and its size.
        """
        if self._post is not None:
            rows = replace(rows, told=told)
        elif not self._before:
            return state
        rows = replace(rows, outcomes=self._to_others(outcome))
        return replace(state, sampled=(*state.sampled, rows))

    def _admit(self, size: Any, state: PipelineState, packed: np.ndarray) -> PipelineState:
        """Writes new requests; drops tokens on their way to earlier requests in these slots."""
        new = set(packed[: size.num_rows].tolist())  # an admission's first leaf
        sampled = []
        for step in state.sampled:
            slots = tuple(self._R if slot in new else slot for slot in step.slots)
            if self._meet(slots, slots) or not (step.outcomes or step.told):
                sampled.append(replace(step, slots=slots))
        state = replace(state, sampled=tuple(sampled))
        for i, table in enumerate(self._tables):
            state = state.put(i, table[Key("admit", size)](state.part(i), packed))
        return state

    def _copy(self, size: Any, state: PipelineState, packed: np.ndarray) -> PipelineState:
        for i, table in enumerate(self._tables):
            state = state.put(i, table[Key("copy", size)](state.part(i), packed))
        return state

    def _prompt_logprobs(self, size: Any, params: Any, state: PipelineState, *args: Any) -> Any:
        if self._last is None:
            return self._told(None)
        run = self._last[Key("prompt_logprobs", size)]
        return self._told(run(params[-1], state.part(-1), *args))


def _receive(table: ProgramTable, part: Any, step: Sampled, i: int) -> Any:
    """Writes a step's sampled tokens into the requests of stage i; returns its state.

    Raises:
      RuntimeError: the tokens are still to come from another process.
    """
    if not step.outcomes:
        raise RuntimeError(
            "a request of this step awaits a token of an earlier one: call receive_tokens first"
        )
    outcome, slot = step.outcomes[i], np.array(step.slots, np.int32)
    size = SampleSize(len(step.slots), num_drafts=outcome.token_ids.shape[1] - 1)
    tables = table[Key("receive", size)](replace(part, kv=()), step.rows[i], outcome, slot)
    return replace(tables, kv=part.kv)


def _without(steps: tuple[Sampled, ...], gone: list[Sampled]) -> tuple[Sampled, ...]:
    return tuple(step for step in steps if not any(step is other for other in gone))
