"""Runs the sampling rules on given logits, without a model, for tests."""

from dataclasses import replace
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxrunner import pytree
from jaxrunner.kernels_pallas import reference
from jaxrunner.layout import MAX_STOP_IDS, WIDE, Program, SampleSize
from jaxrunner.models.llama import llama
from jaxrunner.params import SamplingParams
from jaxrunner.sampling import RULES
from jaxrunner.sampling.rule import Batched
from jaxrunner.sampling.sampler import Drawn, process, sample
from jaxrunner.types import Requests


def program(mode: str = "raw_logprobs", rules=RULES, **changes) -> Program:
    """Returns the static half of an engine."""
    engine = tiny.engine_config(logprobs_mode=mode, **changes)
    return Program(llama, tiny.config(), engine, reference.paged_attention, rules)


def tables(params, seeds=None, rules=RULES) -> tuple[Any, ...]:
    """Returns the rules' tables for one request a row."""
    seeds = range(len(params)) if seeds is None else seeds

    def table(rule):
        rows = [rule.row(p, s) for p, s in zip(params, seeds, strict=True)]
        full = pytree.zeros(rule.params, WIDE | dict(R=len(rows), key=2))
        stack = functools.partial(jax.tree.map, _stack)
        return stack(full, *rows)

    return tuple(table(rule) for rule in rules)


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
    run = jax.jit(functools.partial(process, program=program(rules=rules), rich=True))
    return np.asarray(run(logits, batch, tables(params, seeds, rules)).logits)


@functools.cache
def sampler(program: Program, size: SampleSize):
    """Returns `sample`, compiled for a program and a size."""
    return jax.jit(functools.partial(sample, program=program, size=size))


def draw(logits, params: SamplingParams, seeds, position, *, rich=False, **history) -> np.ndarray:
    """Draws one token for each seed at `position`."""
    count = len(seeds)
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (count, len(logits)))
    batch = batched(requests(count, **history), range(count), [position] * count)
    run = sampler(program(), SampleSize(count, rich))
    return np.asarray(run(logits, batch, tables([params] * count, seeds)).token_ids)


def describe(logits, params, *, mode="raw_logprobs", num_logprobs=1, **history) -> Drawn:
    """Samples from logits, [N, V], with logprobs."""
    size = SampleSize(len(params), True, num_logprobs)
    batch = batched(requests(len(params), **history), range(len(params)), [0] * len(params))
    run = sampler(program(mode), size)
    return jax.tree.map(np.asarray, run(jnp.asarray(logits, jnp.float32), batch, tables(params)))
