"""Sampling where devices share out the rows of a step: each row's tokens are one device's."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import paged
from jaxrunner.parallel.mesh import TENSOR, make_mesh
from jaxrunner.parallel.tensor import shard
from jaxrunner.program.bucket import SampleSize
from jaxrunner.program.program import Program
from jaxrunner.rule import Rule
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import logits_fn, with_logits_fn
from jaxrunner.sampling.drafting import draw_coupled, draw_own
from jaxrunner.sampling.drawing import draw
from jaxrunner.speculators.ngram import ngram
from tests.support import rules, tiny
from tests.support.random_rows import KINDS, OF_SEED, random_logits, row_of
from tests.support.rules import Row

J = 2  # tokens of a row: one draft
WIDE = 5_000  # more than a group of noise, and 625 tokens on each of 8 devices
Rules = tuple[Rule, ...]


@functools.cache
def drawn_by(
    num: int, num_rows: int, rules_: Rules = RULES, mode: str = "raw_logprobs",
    rejection: str = "exact",
):  # fmt: skip
    """Returns the step's `draw`, compiled for `num` devices: what each of them says, [num, ...]."""
    model = llama._replace(speculator=ngram(1)._replace(rejection=rejection))
    config = tiny.config(vocab_size=64, num_attention_heads=8, intermediate_size=32)
    if num > 1:
        model, config = shard(model, config, make_mesh(num))
    engine = tiny.engine_config(logprobs_mode=mode)
    program = Program(model, config, engine, paged, rules_, num_drafts=1)
    run = functools.partial(draw, program=program, size=SampleSize(num_rows, True, 9))
    if num == 1:
        return jax.jit(lambda *args: jax.tree.map(lambda x: x[None], run(*args)))
    whole, each = PartitionSpec(), PartitionSpec(TENSOR)
    specs = PartitionSpec(None, None, TENSOR), whole, whole, whole
    return jax.jit(
        jax.shard_map(
            lambda *args: jax.tree.map(lambda x: x[None], run(*args)),
            mesh=make_mesh(num), in_specs=specs, out_specs=each, check_vma=False,
        )
    )  # fmt: skip


def drawn(num: int, rows: list[Row], logits: np.ndarray, num_rows: int, **how: Any):
    """Returns what `num` devices say of rows, who must all say the same to the bit."""
    state, due = rules.state_of(rows, size=num_rows, rules=how.get("rules_", RULES))
    full = np.zeros((num_rows, *logits.shape[1:]), np.float32)
    full[: len(rows)] = logits
    masks = rules.masks_of(rows, J, logits.shape[-1], num_rows)
    out = jax.tree.map(np.asarray, drawn_by(num, num_rows, **how)(full, state, due, masks))
    for x in jax.tree.leaves(out):
        assert all(one.tobytes() == x[0].tobytes() for one in x)
    return jax.tree.map(lambda x: x[0], out)


def check(num: int, rows: list[Row], logits: np.ndarray, size: int = 20, **how: Any):
    """Compares devices with one; returns what they say, [rows, ...] of each array."""
    want, got = (drawn(n, rows, logits, size, **how) for n in (1, num))
    real = np.arange(size) < len(rows)
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(a[real], b[real])
    if want.num_accepted is not None:
        np.testing.assert_array_equal(got.num_accepted[real], want.num_accepted[real])
    means = np.repeat(real, J) & ~want.not_finite.reshape(-1)
    for name in ("rank", "top_ids", "value", "raw", "processed", "kept_mass", "top_value"):
        a, b = (getattr(out.logprobs[0], name) for out in (got, want))
        np.testing.assert_array_equal(a[means], b[means], err_msg=name)
    told = jax.tree.map(lambda x: x.reshape(size, J, *x.shape[1:]), got.logprobs)
    return jax.tree.map(lambda x: x[: len(rows)], got._replace(logprobs=told))


SIZES = [(2, 64, "processed_logits"), (8, WIDE, "processed_logprobs")]


@pytest.mark.devices("num")
@pytest.mark.parametrize("seed", OF_SEED, ids=OF_SEED.get)
@pytest.mark.parametrize(("num", "size", "mode"), SIZES)
def test_every_rule_draws_and_tells_what_one_device_does(num, size, mode, seed):
    rng = np.random.default_rng([seed, size])
    rows = [row_of(kind, rng, size, J - 1) for kind in KINDS]
    named = SamplingParams(logprob_token_ids=[size - 1, 0, size // num], logprobs=3, top_p=0.9)
    rows.append(Row(named, drafts=[1]))
    logits = random_logits(rng, seed, (len(rows), J, size))
    out = check(num, rows, logits, mode=mode)
    assert len({int(t) * num // size for t in out.token_ids.flat}) > 1
    told = out.logprobs[0].top_ids[-1, :, :3]
    np.testing.assert_array_equal(told, [named.logprob_token_ids] * J)


@pytest.mark.devices(8)
@pytest.mark.parametrize("num_rows", [1, 3, 8, 9])
def test_any_number_of_rows_is_shared_out(num_rows):
    rng = np.random.default_rng(num_rows)
    rows = [row_of("top-k, top-p", rng, 64, J - 1) for _ in range(num_rows)]
    logits = random_logits(rng, 0, (num_rows, J, 64))
    check(8, rows, logits, num_rows)


# A draft is accepted by the distributions of target and drafter, so by all tokens of a row.
@pytest.mark.devices(8)
@pytest.mark.parametrize("rejection", ["standard", "block"])
def test_drafts_are_verified_as_on_one_device(rejection):
    rng = np.random.default_rng(5)
    rows = [row_of(kind, rng, 64, J - 1) for kind in KINDS]
    logits = random_logits(rng, 0, (len(rows), J, 64))
    logits[:8, 0, [row.drafts[0] for row in rows[:8]]] = 9  # likely
    out = check(8, rows, logits, rejection=rejection)
    assert set(out.num_accepted) == {0, 1}


def squares_of_the_upper_half(logits, row):
    """Reads all tokens: which are in the upper half."""
    return jnp.where(logits < jnp.median(logits), -jnp.inf, logits * logits)


@pytest.mark.devices(8)
def test_a_rule_of_the_user_sees_whole_rows():
    given = with_logits_fn(RULES, logits_fn(squares_of_the_upper_half))
    rng = np.random.default_rng(6)
    rows = [row_of(kind, rng, 64, J - 1) for kind in KINDS]
    logits = random_logits(rng, 0, (len(rows), J, 64))
    check(8, rows, logits, rules_=given)


@pytest.mark.devices(8)
def test_ties_and_what_is_lost_may_lie_on_any_device(num=8, size=64):
    own, best = size // num, np.full(size, -np.inf)
    flat, pair, lost = np.zeros(size), np.arange(size) * -1.0, np.zeros(size)
    pair[[own - 1, own]] = 9  # a tie over the boundary
    lost[size - 2] = np.nan
    best[size - 1] = 1
    greedy = SamplingParams(temperature=0)
    k, p = SamplingParams(top_k=own + 1), SamplingParams(top_p=(own + 0.5) / size)
    last = SamplingParams(allowed_token_ids=[size - 1])
    params_and_logits = [
        (greedy, flat), (k, flat), (p, flat), (greedy, pair), (SamplingParams(top_k=1), pair),
        (SamplingParams(top_k=2), pair), (SamplingParams(top_p=0.3), pair),
        (SamplingParams(min_p=0.9), pair), (greedy, lost), (k, lost), (p, lost),
        (SamplingParams(), best), (last, flat), (last, pair), (last, best - np.inf),
        (SamplingParams(), flat + np.inf), (SamplingParams(), flat - np.inf),
        (SamplingParams(allowed_token_ids=[0]), best),
    ]  # fmt: skip
    rows = [Row(params, drafts=[1]) for params, _ in params_and_logits]
    logits = np.stack([np.stack([x] * J) for _, x in params_and_logits])
    out = check(num, rows, logits, mode="raw_logits")
    tokens = out.token_ids
    assert (tokens[0] == 0).all() and (tokens[3:5] == own - 1).all()
    assert tokens[1:3].max() <= own and (tokens[12] == size - 1).all()
    assert out.not_finite[8:11].all() and set(np.nonzero(out.no_choice)[0]) == {17}


@functools.cache
def drafted_by(num: int, num_rows: int, how: Any):
    """Returns what draws drafts, compiled for `num` devices: what each of them says."""
    model, config = llama, tiny.config(vocab_size=64, num_attention_heads=8, intermediate_size=32)
    if num > 1:
        model, config = shard(model, config, make_mesh(num))
    program = Program(model, config, tiny.engine_config(), paged, RULES)

    def run(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None], how(*args, program=program))

    if num == 1:
        return jax.jit(run)
    mapped = jax.shard_map(
        run, mesh=make_mesh(num), in_specs=PartitionSpec(), out_specs=PartitionSpec(TENSOR),
        check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped)


@pytest.mark.devices(8)
@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("how", [draw_coupled, draw_own])
def test_drafts_are_drawn_as_on_one_device(how, num_rows):
    rng = np.random.default_rng(num_rows)
    rows = [row_of(kind, rng, 64, 0) for kind in ("min-p, top-p", *KINDS)[:num_rows]]
    state, due = rules.state_of(rows, size=num_rows)
    logits = random_logits(rng, 0, (num_rows, 64))
    args = state, due.slot, logits, due.next_pos
    want, got = (jax.tree.leaves(drafted_by(num, num_rows, how)(*args)) for num in (1, 8))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, np.broadcast_to(b, a.shape))
