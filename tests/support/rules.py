"""Runs the sampling rules on given logits, without a model, for tests; and their oracle."""

from collections.abc import Callable, Sequence
from dataclasses import replace
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import paged
from jaxrunner.program.bucket import MAX_STOP_IDS, WIDE, SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Batched
from jaxrunner.sampling import RULES
from jaxrunner.sampling.drawing import draw as draw_step
from jaxrunner.sampling.sampler import SamplerOutput, process, sample
from jaxrunner.types import Requests, SamplingMetadata, State
from tests.support import tiny

SIZE = 20  # slots of a hand-made batch: one size, few compilations


class Row(NamedTuple):
    """A request that is due a token at each of 1 + drafts positions."""

    params: SamplingParams = SamplingParams()
    prompt: Sequence[int] = ()
    outputs: Sequence[int] = ()
    drafts: Sequence[int] = ()
    stop_ids: Sequence[int] = ()
    masks: Any = None  # [1 + drafts, ceil(V / 32)]

    @property
    def next_pos(self) -> int:
        """Position of the first token that is due."""
        return len(self.prompt) + len(self.outputs)

    @property
    def num_due(self) -> int:
        """Tokens that are due."""
        return 1 + len(self.drafts)


class Expected(NamedTuple):
    """What the oracle makes of one token's logits."""

    logits: np.ndarray  # [V], float64
    kept_mass: float
    no_choice: bool


def program(mode: str = "raw_logprobs", rules=RULES, **changes) -> Program:
    """Returns the static half of an engine."""
    engine = tiny.engine_config(logprobs_mode=mode, **changes)
    return Program(llama, tiny.config(), engine, paged, rules)


def tables(params, seeds=None, rules=RULES) -> dict[str, Any]:
    """Returns the rules' tables for one request a row."""
    seeds = range(len(params)) if seeds is None else seeds

    def table(rule):
        rows = [rule.row(p, s) for p, s in zip(params, seeds, strict=True)]
        return jax.tree.map(_stack, _shapes(rule.params, len(rows)), *rows)

    return {rule.name: table(rule) for rule in rules}


@functools.cache
def _shapes(params: type, num_rows: int):
    return jax.eval_shape(lambda: pytree.zeros(params, WIDE | dict(R=num_rows, key=2)))


def _stack(full, *rows):
    out = np.zeros(full.shape, full.dtype)
    for i, row in enumerate(rows):
        out[(i, *(slice(n) for n in np.shape(row)))] = row
    return jnp.asarray(out)


def requests(
    count, *, prompts=(), outputs=(), stop_ids=(), min_len=0, vocab_size=2**30
) -> Requests:
    """Returns a table of requests. `outputs` may end in drafts."""
    prompts, outputs = prompts or [[]] * count, outputs or [[]] * count
    longest = max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)) + 1
    longest = -(-longest // 32) * 32  # few shapes, few compilations
    zeros = pytree.zeros(Requests, dict(R=count, L=longest, X=MAX_STOP_IDS, M=1, G=1))
    ids = np.zeros((count, longest), np.int32)
    for row, prompt, output in zip(ids, prompts, outputs, strict=True):
        row[: len(prompt) + len(output)] = [*prompt, *output]
    stops = np.full((count, MAX_STOP_IDS), vocab_size, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    return replace(
        zeros,
        token_ids=jnp.asarray(ids),
        prompt_len=jnp.asarray([len(p) for p in prompts], jnp.int32),
        max_len=jnp.full(count, longest, jnp.int32),
        stop_ids=jnp.asarray(stops),
        min_len=jnp.full(count, min_len, jnp.int32),
    )


def batched(table: Requests, slot, position, mask=None) -> Batched:
    """Returns rows of a batch: their slots, and the positions of the tokens that are due."""
    mask = None if mask is None else jnp.asarray(mask)
    return Batched(jnp.asarray(slot, jnp.int32), jnp.asarray(position, jnp.int32), table, mask)


def processed(logits, params, *, position=None, rules=RULES, mask=None, seeds=None, **history):
    """Returns what all rules make of logits, [N, V], one request a row."""
    table = requests(len(params), **history)
    if position is None:
        lengths = zip(history.get("prompts") or [[]] * len(params),
                      history.get("outputs") or [[]] * len(params), strict=True)  # fmt: skip
        position = [len(p) + len(o) for p, o in lengths]
    batch = batched(table, range(len(params)), position, mask)
    logits = jnp.asarray(logits, jnp.float32)
    run = processor(program(rules=rules))
    return np.asarray(run(logits, batch, tables(params, seeds, rules)).logits)


@functools.cache
def processor(program: Program):
    """Returns `process` with all rules, compiled for a program."""
    return jax.jit(functools.partial(process, program=program, all_rules=True))


@functools.cache
def sampler(program: Program, size: SampleSize):
    """Returns `sample`, compiled for a program and a size."""
    return jax.jit(functools.partial(sample, program=program, size=size))


@functools.cache
def drawer(program: Program, size: SampleSize):
    """Returns the step's `draw`, compiled for a program and a size."""
    return jax.jit(functools.partial(draw_step, program=program, size=size))


def draws(logits, params: SamplingParams, seeds, positions, *, all_rules=False) -> np.ndarray:
    """Draws a token for each seed at each position, [positions, seeds]."""
    count = len(seeds)
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (count, len(logits)))
    run, table = sampler(program(), SampleSize(count, all_rules)), tables([params] * count, seeds)
    known = requests(count)
    batches = (batched(known, range(count), [p] * count) for p in positions)
    return np.stack([np.asarray(run(logits, batch, table).token_ids) for batch in batches])


def draw(logits, params: SamplingParams, seeds, position, *, all_rules=False) -> np.ndarray:
    """Draws one token for each seed at `position`."""
    return draws(logits, params, seeds, [position], all_rules=all_rules)[0]


def describe(logits, params, *, mode="raw_logprobs", num_logprobs=1, **history) -> SamplerOutput:
    """Samples from logits, [N, V], with logprobs."""
    size = SampleSize(len(params), True, num_logprobs)
    batch = batched(requests(len(params), **history), range(len(params)), [0] * len(params))
    run = sampler(program(mode), size)
    return jax.tree.map(np.asarray, run(jnp.asarray(logits, jnp.float32), batch, tables(params)))


def state_of(
    rows: Sequence[Row], *, seeds=None, size: int = SIZE, rules=RULES
) -> tuple[State, SamplingMetadata]:
    """Returns a state of `size` slots that holds `rows`, the last first, and a step of them."""
    count = len(rows)
    seeds = [*(range(count) if seeds is None else seeds), *[0] * (size - count)][::-1]
    filled = [*rows, *[Row()] * (size - count)][::-1]
    table = requests(size, prompts=[r.prompt for r in filled],
                     outputs=[[*r.outputs, *r.drafts] for r in filled])  # fmt: skip
    stops = np.full((size, MAX_STOP_IDS), 2**30, np.int32)
    for stop, row in zip(stops, filled, strict=True):
        stop[: len(row.stop_ids)] = row.stop_ids
    least = [len(row.prompt) + row.params.min_tokens for row in filled]
    total = jnp.asarray([row.next_pos for row in filled], jnp.int32)
    table = replace(
        table, stop_ids=jnp.asarray(stops), min_len=jnp.asarray(least, jnp.int32), total_len=total
    )
    slot = jnp.arange(size - 1, -1, -1, dtype=jnp.int32)
    real = jnp.arange(size) < count
    due = jnp.asarray([row.num_due for row in filled], jnp.int32)[slot]
    step_rows = SamplingMetadata(
        slot=jnp.where(real, slot, size),
        seq_lens=jnp.where(real, total[slot] + due - 1, 0),
        samples=real,
        next_pos=jnp.where(real, total[slot], 0),
        num_drafts=jnp.where(real, due - 1, 0),
    )
    return State(table, (), tables([row.params for row in filled], seeds, rules)), step_rows


def run(function: Callable, rows: Sequence[Row], logits, *, state=None, J: int = 3, size=SIZE):
    """Runs `process` or `sample` on logits, [rows, J, V]. Returns what each row's tokens got.

    Rows stand in other slots than their own number, among padding. `state` replaces theirs.
    """
    made, due = state_of(rows, size=size)
    state, V = made if state is None else state, np.shape(logits)[-1]
    j = jnp.arange(J)[None]
    slot = jnp.where(j <= due.num_drafts[:, None], due.slot[:, None], size)
    batch = batched(state.requests, slot.reshape(-1), (due.next_pos[:, None] + j).reshape(-1),
                    masks_of(rows, J, V, size).reshape(size * J, -1))  # fmt: skip
    full = np.zeros((size, J, V), np.float32)
    full[: len(rows)] = logits
    out = jax.tree.map(np.asarray, function(full.reshape(-1, V), batch, state.tables))
    return [
        jax.tree.map(lambda x, i=i, n=row.num_due: x[i * J : i * J + n], out)
        for i, row in enumerate(rows)
    ]


def masks_of(rows: Sequence[Row], J: int, V: int, size: int = SIZE) -> np.ndarray:
    """Returns grammar masks, [size, J, ceil(V / 32)]; those past a row's drafts allow all."""
    masks = np.full((size, J, -(-V // 32)), -1, np.int32)
    for mask, row in zip(masks, rows, strict=False):
        if row.masks is not None:
            mask[: row.num_due] = row.masks
    return masks


def step_draw(
    rows: Sequence[Row], logits, *, num_logprobs=0, seeds=None, size=SIZE
) -> SamplerOutput:
    """Runs the step's own `draw` on logits, [rows, J, V]; [rows, J] and [rows, J, C] come back."""
    state, due = state_of(rows, seeds=seeds, size=size)
    _, J, V = np.shape(logits)
    full = np.zeros((size, J, V), np.float32)
    full[: len(rows)] = logits
    draw = drawer(program(), SampleSize(size, True, num_logprobs))
    out = draw(full, state, due, masks_of(rows, J, V, size))
    told = jax.tree.map(lambda x: x.reshape(size, J, *x.shape[1:]), out.logprobs)
    return jax.tree.map(lambda x: np.asarray(x)[: len(rows)], out._replace(logprobs=told))


def expected(row: Row, j: int, logits) -> Expected:
    """Says what the j-th due token of a request must get, in vLLM's order of rules."""
    mask = None if row.masks is None else row.masks[j]
    allowed = [float(x) if allows(mask, t) else -math.inf for t, x in enumerate(logits)]
    before = [*row.outputs, *row.drafts[:j]]
    x = [_shaped(row, before, t, x) for t, x in enumerate(allowed)]
    kept = _kept(x, row.params)
    if not kept:
        return Expected(np.array(allowed), 1.0, True)
    best = max(x)
    total = math.fsum(math.exp(v - best) for v in x)
    mass = math.fsum(math.exp(x[t] - best) for t in kept)
    out = [v if t in kept else -math.inf for t, v in enumerate(x)]
    return Expected(np.array(out), mass / total, False)


def allows(mask, token: int) -> bool:
    """Whether a grammar mask has a token."""
    return mask is None or int(mask[token // 32]) % 2**32 // 2 ** (token % 32) % 2 == 1


def _shaped(row: Row, before: list[int], token: int, x: float) -> float:
    """Returns the logit of one token before truncation; `before` are the outputs so far."""
    p = row.params
    if p.allowed_token_ids and token not in p.allowed_token_ids:
        return -math.inf
    for biased, bias in dict(p.logit_bias or ()).items():
        x += bias if biased == token else 0
    if token in row.stop_ids and len(before) < p.min_tokens:
        return -math.inf
    count = before.count(token)
    if count or token in row.prompt:
        x = x / p.repetition_penalty if x > 0 else x * p.repetition_penalty
    x -= p.frequency_penalty * count
    x -= p.presence_penalty if count else 0
    for *start, last in p.bad_words or ():
        if last == token and before[len(before) - len(start) :] == start:
            return -math.inf
    return x / (p.temperature or 1.0)


def _kept(x: list[float], p: SamplingParams) -> set[int]:
    """Returns the tokens that min-p, top-k and top-p leave."""
    order = sorted((t for t, v in enumerate(x) if v > -math.inf), key=lambda t: (-x[t], t))
    if not order:
        return set()
    best = x[order[0]]
    if p.min_p:
        order = [t for t in order if x[t] >= best + math.log(p.min_p)]
    order = order[: p.top_k or None]
    weights = [math.exp(x[t] - best) for t in order]
    kept, mass, total = set(), 0.0, math.fsum(weights)
    for token, weight in zip(order, weights, strict=True):
        if kept and p.top_p < 1 and mass >= p.top_p * total:
            break
        kept.add(token)
        mass += weight
    return kept
