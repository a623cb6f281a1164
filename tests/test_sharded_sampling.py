"""Sampling where each device has the logits of some tokens: what one device draws and tells."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.program_key import Key
from jaxrunner.device.program_spec import program_spec
from jaxrunner.models.llama import llama
from jaxrunner.parallel.mesh import TENSOR, make_mesh, shardings
from jaxrunner.parallel.tensor import shard
from jaxrunner.parallel.vocabulary import Vocabulary
from jaxrunner.program import Bucket, SampleSize
from jaxrunner.programs.build import build
from jaxrunner.pytree import abstract
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import logits_fn, with_logits_fn
from jaxrunner.sampling.gumbel import GROUP, RARE, gumbel, gumbel_from, rare
from jaxrunner.sampling.sampler import SamplerOutput, sample
from jaxrunner.speculators.ngram import ngram
from tests.support import rules, tiny
from tests.support.random_rows import KINDS, OF_SEED, random_logits, row_of
from tests.support.rules import Row

J = 2  # tokens of a row: one draft
WIDE = 5_000  # more than a group of noise, and 625 tokens on each of 8 devices


@functools.cache
def sharded(num: int, mode: str, size: SampleSize):
    """Returns `sample` on `num` devices, which gives what each of them says, [num, ...]."""

    def one(logits, batch, tables):
        batch = batch._replace(vocabulary=Vocabulary(num))
        out = sample(logits, batch, tables, program=rules.program(mode), size=size)
        return jax.tree.map(lambda x: x[None], out)

    cut, whole, each = PartitionSpec(None, TENSOR), PartitionSpec(), PartitionSpec(TENSOR)
    return jax.jit(
        jax.shard_map(
            one, mesh=make_mesh(num), in_specs=(cut, whole, whole), out_specs=each, check_vma=False
        )
    )


def on_shards(num: int, mode: str, size: SampleSize, *args: Any) -> SamplerOutput:
    """Returns what the devices say, who must all say the same to the bit."""
    out = jax.tree.map(np.asarray, sharded(num, mode, size)(*args))
    for x in jax.tree.leaves(out):
        assert all(one.tobytes() == x[0].tobytes() for one in x)
    return jax.tree.map(lambda x: x[0], out)


def check(num: int, rows: list[Row], logits: np.ndarray, *, mode: str, num_logprobs: int = 9):
    """Compares devices with one, row by row; returns what they say."""
    size = SampleSize(rules.SIZE * J, True, num_logprobs)
    one = rules.sampler(rules.program(mode), size)
    wants, gots = (
        rules.run(run, rows, logits, J=J)
        for run in (one, functools.partial(on_shards, num, mode, size))
    )
    for want, got in zip(wants, gots, strict=True):
        np.testing.assert_array_equal(got.not_finite, want.not_finite)
        np.testing.assert_array_equal(got.no_choice, want.no_choice)
        means = ~want.not_finite
        np.testing.assert_array_equal(got.token_ids[means], want.token_ids[means])
        (ours,), (theirs,) = got.logprobs, want.logprobs
        for name in ("rank", "top_ids"):
            a, b = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_array_equal(a[means], b[means], err_msg=name)
        for name in ("value", "raw", "processed", "kept_mass", "top_value"):
            a, b = getattr(ours, name), getattr(theirs, name)
            np.testing.assert_allclose(a[means], b[means], rtol=1e-5, atol=1e-5, err_msg=name)
    return gots


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
    assert len({int(t) * num // size for row in out for t in row.token_ids}) > 1
    told = out[-1].logprobs[0].top_ids[:, :3]
    np.testing.assert_array_equal(told, [named.logprob_token_ids] * J)


# XLA's largest of many numbers forgets NaN on a CPU, on one device alike: rows are narrow here.
@pytest.mark.devices(8)
def test_ties_and_what_is_lost_may_lie_on_any_device(num=8, mode="raw_logits", size=64):
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
    out = check(num, rows, logits, mode=mode, num_logprobs=size)
    tokens = [row.token_ids.tolist() for row in out]
    assert tokens[0] == [0] * J and tokens[3] == tokens[4] == [own - 1] * J
    assert max(tokens[1] + tokens[2]) <= own and tokens[12] == [size - 1] * J
    assert [row.not_finite.all() for row in out[8:11]] == [True] * 3
    assert [i for i, row in enumerate(out) if row.no_choice.any()] == [17]


@pytest.mark.devices(8)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 6.0])
def test_any_cut_keeps_what_a_sorted_row_does(scale):
    """Rows that keep a few tokens, or nearly all; of all rows the same noise."""
    rng, size = np.random.default_rng(1), SampleSize(rules.SIZE * J)
    kinds: list[dict[str, Any]] = [dict(top_k=k) for k in (1, 2, 63, 625, 626, WIDE - 1)]
    kinds += [dict(top_p=p) for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999)]
    kinds += [dict(top_k=k, top_p=0.7) for k in (2, 9, 700, WIDE)]
    rows = [Row(SamplingParams(temperature=1.3, **kind), drafts=[1]) for kind in kinds]
    logits = rng.normal(size=(len(rows), J, WIDE)).astype(np.float32) * scale
    logits[:, 1] = np.round(logits[:, 1], 1)
    logits[:, :, rng.integers(0, WIDE, 99)] = -np.inf
    if not scale:  # where masses are equal, p of them is a whole number of tokens, or nearly
        rows = [row for row in rows if row.params.top_p == 1]
        logits = logits[: len(rows)]
    one = rules.sampler(rules.program(), size)
    run = functools.partial(on_shards, 8, "raw_logprobs", size)
    want, got = (rules.run(run, rows, logits, J=J) for run in (one, run))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)


def test_noise_of_a_part_is_that_of_the_whole():
    hashes = jax.vmap(jax.random.fold_in, (None, 0))
    keys, groups = hashes(jax.random.key(3), jnp.arange(999)), jnp.arange(8, dtype=jnp.uint32)
    words = jax.random.key_data(jax.vmap(hashes, (0, None))(keys, groups + jnp.uint32(RARE)))
    token_ids = np.asarray(rare(groups[None], words[..., 0], words[..., 1])[0])
    number, rare_id, num = int(token_ids.max(1).argmax()), int(token_ids.max()), GROUP + 9
    assert num < rare_id < 8 * GROUP - num
    whole = np.asarray(gumbel(keys[number], 8 * GROUP))
    part = jax.jit(gumbel_from, static_argnums=2)
    for first in (0, 7, GROUP - 3, rare_id, rare_id - num + 1, rare_id - num):
        got = part(jnp.int32(first), keys[number], num)
        np.testing.assert_array_equal(got, whole[first : first + num])


def told_of(rules_: Any = RULES, speculator: Any = None) -> tuple[set[int], int]:
    """Returns the sizes of axes that a usual step on 2 devices sends, and its tokens a device."""
    sizes: dict[str, Any] = dict(
        vocab_size=112, num_attention_heads=8, hidden_size=24, intermediate_size=32
    )
    model, config = shard(llama, tiny.config(**sizes), mesh := make_mesh(2))
    model, dims = model._replace(speculator=speculator), config.dims | dict(param="float32")
    at = shardings(model.params, dims, mesh)
    params = jax.tree.map(lambda x, at: x.update(sharding=at), abstract(model.params, dims), at)
    built = build(model, config, tiny.engine_config(), params, rules=rules_)
    bucket = Bucket(5, 5, 1) if speculator is None else Bucket(10, 5, 2, 1)
    spec = program_spec(built.program, params, Key("step", bucket))
    step = jax.jit(spec.function, static_argnames=[name for name, _ in spec.static])
    text = step.lower(*spec.args, **dict(spec.static)).as_text()
    assert not re.search(r"collective_permute|all_to_all|reduce_scatter", text)
    shapes = re.findall(r"stablehlo\.all_(?:gather|reduce)(?s:.*?)-> tensor<([\dx]+)x[a-z]", text)
    return {int(size) for shape in shapes for size in shape.split("x")}, 112 // 2


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("rules_", "speculator", "is_gathered"),
    [
        (RULES, None, False),
        (with_logits_fn(RULES, logits_fn(lambda logits, row: logits)), None, True),
        (RULES, ngram(1), False),
        (RULES, ngram(1)._replace(rejection="standard"), True),
    ],
    ids=["usual", "a rule of the user", "exact drafts", "standard drafts"],
)
def test_a_step_sends_logits_only_where_a_rule_reads_all(rules_, speculator, is_gathered):
    sizes, own = told_of(rules_, speculator)
    assert (2 * own in sizes) == is_gathered and own not in sizes and 24 in sizes
