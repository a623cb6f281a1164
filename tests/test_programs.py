"""Buckets, the table of programs, transfers, and the two-phase path."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device import packing
from jaxrunner.device.buckets import choose, powers, step_buckets
from jaxrunner.program.bucket import Bucket
from jaxrunner.programs.program_table import Key
from jaxrunner.scheduling.request import GrammarOutput
from jaxrunner.speculators.ngram import ngram
from jaxrunner.types import Plan
from tests.support import tiny

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def buckets(rows, tokens, num_drafts=0, adaptive=False):
    config = tiny.engine_config(
        max_num_seqs=rows, max_num_batched_tokens=tokens[-1], token_buckets=tokens,
        decode_buckets=tuple(t for t in (1, 2, 4, 8, 16) if t <= rows), num_blocks=60,
    )  # fmt: skip
    drafting = ngram(num_drafts)._replace(adaptive=adaptive) if num_drafts else None
    return step_buckets(config, drafting)


@pytest.mark.parametrize(
    "counts,want",
    [
        ([1, 1, 1], (4, 4, 1)),
        ([2, 2, 2], (8, 8, 0)),
        ([1] * 5, (8, 8, 1)),
        ([9], (16, 8, 0)),
        ([1, 1, 9], (16, 8, 0)),
    ],
)
def test_the_first_bucket_that_fits_is_chosen(counts, want):
    got = choose(buckets(8, (1, 2, 4, 8, 16)), counts)
    assert (got.num_tokens, got.num_rows, got.query_len) == want


@pytest.mark.parametrize(
    "counts,want",
    [([4], (4, 1, 4)), ([4] * 3, (16, 4, 4)), ([4, 4, 3], (16, 4, 4)), ([5], (8, 4, 0))],
)
def test_uniform_buckets_of_drafting_rows(counts, want):
    got = choose(buckets(4, (4, 8, 16), num_drafts=3), counts)
    assert (got.num_tokens, got.num_rows, got.query_len) == want


@pytest.mark.parametrize(
    "counts,num_drafts,want",
    [
        ([1], 0, (1, 1, 1, 0)), ([1], 3, (4, 1, 4, 3)), ([4, 2], 3, (8, 2, 4, 3)),
        ([1] * 4, 0, (4, 4, 1, 0)), ([5, 1], 0, (8, 4, 0, 0)),
    ],
)  # fmt: skip
def test_adaptive_drafts_have_uniform_buckets_beside_those_without(counts, num_drafts, want):
    got = choose(buckets(4, (4, 8, 16), 3, True), counts, num_drafts=num_drafts)
    assert (got.num_tokens, got.num_rows, got.query_len, got.num_drafts) == want


def test_where_requests_are_many_adaptive_steps_verify_fewer_drafts_of_each():
    sizes = 64, 128, 192, 256, 384
    config = tiny.engine_config(
        max_num_seqs=384, max_num_batched_tokens=4096, decode_buckets=sizes, num_blocks=9000
    )
    table = step_buckets(config, ngram(3)._replace(adaptive=True))
    drafts = {b.num_rows: b.num_drafts for b in table if b.num_drafts}
    assert drafts == {64: 3, 128: 3, 192: 1, 256: 1}
    assert [b.num_rows for b in table if b.query_len == 1] == list(sizes)


def test_a_step_that_fits_no_bucket_is_refused():
    with pytest.raises(ValueError, match="a step of 1 requests and 17 tokens fits no bucket"):
        choose(buckets(8, (8, 16)), [17])


def test_every_legal_step_fits():
    table = buckets(5, (8, 32))
    rng = np.random.default_rng(0)
    for _ in range(500):
        rows = rng.integers(1, 6)
        counts = rng.integers(1, 32 // rows + 1, rows).tolist()
        b = choose(table, counts)
        assert b.num_tokens >= sum(counts) and b.num_rows >= rows
        assert b.query_len in (0, counts[0])
    assert powers(1, 20) == [1, 2, 4, 8, 16, 20]


def test_packing_and_unpacking_are_inverse():
    spec = dict(
        a=jax.ShapeDtypeStruct((2, 3), jnp.int32), b=jax.ShapeDtypeStruct((4,), jnp.float32),
        c=jax.ShapeDtypeStruct((3,), jnp.bool), d=jax.ShapeDtypeStruct((), jnp.uint32),
    )  # fmt: skip
    tree = dict(
        a=np.arange(6).reshape(2, 3), b=np.array([0.5, -np.inf, np.nan, -0.0], np.float32),
        c=np.array([True, False, True]), d=np.uint32(2**32 - 1),
    )  # fmt: skip
    vector = packing.pack(spec, tree)
    assert vector.dtype == np.int32 and vector.size == packing.packed_size(spec) == 14
    back = jax.jit(lambda v: packing.unpack(spec, v))(vector)
    for key, value in tree.items():
        np.testing.assert_array_equal(np.asarray(back[key]), value)
    with pytest.raises(ValueError, match=r"packed arrays must be \(2, 3\), got \(3, 2\)"):
        packing.pack(spec, tree | dict(a=np.zeros((3, 2))))


def test_a_wrong_shape_is_named():
    dims = dict(B=3, W=2, G=1)
    plan = pytree.zeros(Plan, dims)
    pytree.check(plan, dims)
    with pytest.raises(ValueError, match=r"Plan\.slot must be int32\[4\], got int32\[3\]"):
        pytree.check(plan, dims | dict(B=4))


@pytest.fixture(scope="module")
def runner():
    return tiny.runner()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_phases_equal_one(runner, temperature):
    params = SamplingParams(temperature=temperature, top_k=9)
    request = tiny.new_request("a", PROMPT, blocks=range(8), params=params)
    whole = tiny.generate(runner, request, 6)
    new, out = [request], []
    for count in (5, 3, 1, 1, 1, 1, 1):
        runner.execute_model(tiny.scheduled({"a": count}, new))
        out += runner.sample_tokens().get().sampled_token_ids[0]
        new = []
    assert out == whole
    runner.step(tiny.scheduled({}, finished_req_ids={"a"}))


def test_a_grammar_mask_constrains_its_request_alone(runner):
    requests = [tiny.new_request(n, PROMPT, blocks=range(8 * i, 8 * i + 8))
                for i, n in enumerate("ab")]  # fmt: skip
    free = tiny.generate(runner, requests[1], 1)
    allowed = {17, 33, 60}
    mask = np.zeros((1, 2), np.uint32)
    for token in allowed:
        mask[0, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    runner.execute_model(tiny.scheduled({"a": 8, "b": 8}, requests))
    with pytest.raises(
        RuntimeError, match="execute_model has begun a step: call sample_tokens first"
    ):
        runner.execute_model(tiny.scheduled({"a": 1}))
    with pytest.raises(ValueError, match="must name requests of the step, each once, got 'x'"):
        runner.sample_tokens(GrammarOutput(("x",), mask.view(np.int32)))
    output = runner.sample_tokens(GrammarOutput(("a",), mask.view(np.int32))).get()
    got = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
    assert got["a"][0] in allowed and got["b"] == free
    assert runner.sample_tokens().get().req_ids == ()
    runner.step(tiny.scheduled({}, finished_req_ids={"a", "b"}))


def test_a_closed_runner_says_so():
    closed = tiny.runner()
    closed.close()
    new = [tiny.new_request("a", [1, 2], blocks=[0])]
    for run in (closed.step, closed.execute_model):
        with pytest.raises(RuntimeError, match="this runner is closed: build another one"):
            run(tiny.scheduled({"a": 2}, new))


def test_the_ledger_says_what_was_compiled_and_why():
    programs = tiny.runner().programs
    key = Key("step", Bucket(5, 5, 1))
    programs.warm_up([key, key])
    assert [(c.key, c.reason) for c in programs.ledger] == [(key, "warm-up")]
    programs[key._replace(size=Bucket(5, 5))]
    assert programs.ledger[1].reason == "query_len=0, not 1"


@pytest.mark.parametrize("name", ["step", "forward"])
@pytest.mark.parametrize("size", [Bucket(5, 5, 1), Bucket(32, 5, 0)])
def test_the_step_never_copies_the_cache(whole, name, size):
    """The cache is donated and updated in place: no instruction copies an array of its shape."""
    runner = tiny.runner()
    program = runner.programs[Key(name, size)]
    copies = re.findall(r"= f32\[60,2,4,8\]\S* copy\(.*", program.as_text())
    assert not copies
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(runner.state))
    assert program.memory_analysis().alias_size_in_bytes >= state_bytes
