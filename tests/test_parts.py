"""Programs in parts: what a cut program returns, donates and keeps is what the whole one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.device.parts import cutting, parts
from jaxrunner.device.program_key import Key
from jaxrunner.program.bucket import Bucket
from jaxrunner.programs.program_table import LOADED
from tests.support import tiny
from tests.support.kept_programs import make, no_cache_of_jax, reasons
from tests.support.tiny_engine import run

STEP = Key("step", Bucket(5, 5, 1))
PROMPTS = [5, 3, 60, 2], [7] * 9
NUM = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM)
__all__ = ["no_cache_of_jax"]  # a fixture of every test here
reads_parts = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="programs are cut where a CPU runs them"
)


def greedy(prompt):
    """Returns the likeliest tokens, each by a pass over all before it."""
    ids = list(prompt)
    while len(ids) < len(prompt) + NUM:
        ids.append(int(tiny.dense_logits(*tiny.model_and_params(), ids)[-1].argmax()))
    return ids[len(prompt) :]


@reads_parts
def test_tokens_and_later_starts_are_those_of_whole_programs(tmp_path):
    for reason in ("warm-up", LOADED):
        engine = make(tmp_path)
        engine.warm_up()
        assert isinstance(engine.runner.programs[STEP], parts.Parts)
        assert reasons(engine) == {reason}
        assert run(engine, PROMPTS, [GREEDY] * 2) == [greedy(prompt) for prompt in PROMPTS]


def test_caches_are_updated_in_place():
    runner = tiny.runner()
    caches = jax.tree.leaves(runner.state.kv)
    before = [cache.unsafe_buffer_pointer() for cache in caches]
    tiny.generate(runner, tiny.new_request("a", [1, 2, 3], blocks=[1, 2, 3]), 2)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(runner.state.kv)] == before
    assert all(cache.is_deleted() for cache in caches)
    assert runner.programs[STEP].memory_analysis().temp_size_in_bytes > 0


@jax.jit
def repeated(x, scale):
    for _ in range(cutting.LEAST_OPERATIONS):
        x = jnp.sin(x) * scale
    return x, x.sum()


def chain(x, kept, spare, *, num):
    """Calls with a literal, sums of which one is read by nobody, arguments that pass through."""
    y, total = x + spare.sum(), jnp.zeros(())
    for i in range(num):
        y, part = repeated(y, 2.0)
        total = total + part if i == num - 1 else total
    return {"kept": kept, "x": y * kept, "total": total, "literal": 3}


@pytest.mark.parametrize("more, is_cut", [(-1, False), (0, True), (3, True)])
def test_a_program_is_cut_at_calls_that_are_many(more, is_cut):
    num = cutting.LEAST_CALLS + more
    args = np.arange(4.0, dtype=np.float32), np.full(4, 0.5, np.float32), np.ones(4, np.float32)
    traced = jax.jit(chain, static_argnames="num", donate_argnames="spare").trace(*args, num=num)
    lowered = cutting.cut(traced)
    assert (lowered is not None) == is_cut
    if lowered is None:
        return
    program = lowered.compile({})
    assert len(program.told[0]) == 3  # what is before, one call, what is behind
    want, got = chain(*args, num=num), program(*args)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_what_nobody_reads_is_left_out():
    def unread(x):
        jnp.sort(x)
        for _ in range(cutting.LEAST_CALLS):
            x, _ = repeated(x, 2.0)
        return x

    lowered = cutting.cut(jax.jit(unread).trace(np.ones(3, np.float32)))
    assert lowered is not None and len(lowered.compile({}).told[0]) == 1  # the call alone


def test_a_program_with_much_between_its_calls_is_whole():
    def between(x):
        for _ in range(cutting.LEAST_CALLS + cutting.MOST_REST):
            x = repeated(x, 1.5)[0] + 1
        return x

    assert cutting.cut(jax.jit(between).trace(np.ones(3, np.float32))) is None


def sampled(x, *, num):
    """Equal calls, then equations of a scope that are the same whatever `num`."""
    for _ in range(num):
        x, _ = repeated(x, 2.0)
    with jax.named_scope(cutting.SCOPES[0]):
        return jnp.sort(x) + x.sum()


def test_sampling_is_compiled_once_for_programs_of_as_many_rows():
    x = np.arange(4.0, dtype=np.float32)
    programs = []
    for num in (cutting.LEAST_CALLS, cutting.LEAST_CALLS + 1):
        traced = jax.jit(sampled, static_argnames="num").trace(x, num=num)
        lowered = cutting.cut(traced)
        assert lowered is not None
        programs.append(lowered.compile({}))
        np.testing.assert_allclose(programs[-1](x), sampled(x, num=num), rtol=1e-5)
    one, other = (program.told[0] for program in programs)
    assert [*map(id, one)] == [*map(id, other)] and len(one) == 2  # a call, and what samples


@reads_parts
def test_steps_of_as_many_rows_share_what_samples():
    runner = tiny.runner(decode_buckets=(5,), token_buckets=(16, 32))
    buckets = Bucket(5, 5, 1), Bucket(16, 5), Bucket(32, 5)
    found = [runner.programs[Key("step", bucket)] for bucket in buckets]
    last = [program.told[0][program.told[1].launches[-1].program] for program in found]
    assert last[0] is last[1] is last[2]
