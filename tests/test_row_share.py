"""Rows that devices share out to sample: what they exchange, and that all get the same back."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from jaxrunner.device.program_key import Key
from jaxrunner.device.program_spec import program_spec
from jaxrunner.models.llama import llama
from jaxrunner.parallel import row_share
from jaxrunner.parallel.mesh import TENSOR, make_mesh, shardings
from jaxrunner.parallel.row_share import RowShare
from jaxrunner.parallel.tensor import shard
from jaxrunner.program.bucket import Bucket, PromptLogprobsSize, SampleSize
from jaxrunner.programs.build import build
from jaxrunner.pytree import abstract
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import logits_fn, with_logits_fn
from jaxrunner.speculators.ngram import ngram
from tests.support import tiny
from tests.support.jaxprs import equations, traced
from tests.support.lowering import compiled_by, compiles


@pytest.mark.devices(8)
@pytest.mark.parametrize("num_rows", [1, 8, 11])
def test_rows_come_back_as_they_were(num_rows):
    """A number of each kind that sampling tells of, the largest of them too."""
    share, x = RowShare(num_rows, 8), np.arange(num_rows * 3, dtype=np.int32).reshape(-1, 3)
    lost = np.where(x % 4 == 1, np.nan, np.where(x % 4 == 2, -np.inf, x)).astype(np.float32)
    tree = x[:, 0], x + (1 << 24) - 40, x % 2 == 1, lost, lost.repeat(2, 0), ()

    def run(tree: Any) -> Any:
        first, second, flags, *floats = share.own(tree[:4], fill=5)
        padding = jnp.arange(share.num_own) + jax.lax.axis_index(TENSOR) * share.num_own >= num_rows
        kept = jnp.where(padding, first == 5, True).all()
        out = share.whole((first, second, flags, *floats, jnp.repeat(floats[0], 2, 0), ()))
        return jax.tree.map(lambda x: x[None], (*out, kept))

    each = PartitionSpec(TENSOR)
    mapped = jax.shard_map(
        run, mesh=make_mesh(8), in_specs=PartitionSpec(), out_specs=each, check_vma=False
    )
    *got, kept = jax.jit(mapped)(tree)
    assert kept.all()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.broadcast_to(b[None], a.shape))


@pytest.mark.devices(8)
@pytest.mark.parametrize("by", ["sum", "all-to-all"])
@pytest.mark.parametrize(("num_rows", "tokens"), [(1, ()), (11, ()), (9, (3,))])
def test_each_device_gets_the_logits_of_its_rows(num_rows, tokens, by, monkeypatch):
    """Bit for bit but for the sign of 0; rows behind the last one have no logit that could win."""
    if by == "all-to-all":
        monkeypatch.setattr(row_share, "MAX_SUM_BYTES", 0)
    share, V = RowShare(num_rows, 8), 40
    logits = jax.random.normal(jax.random.key(0), (num_rows, *tokens, V), jnp.bfloat16)
    for at, value in enumerate((jnp.nan, -jnp.inf, jnp.inf, -0.0)):
        logits = logits.at[..., at * 11].set(value)
    cut = PartitionSpec(*[None] * (logits.ndim - 1), TENSOR)
    mapped = jax.shard_map(
        share.deal, mesh=make_mesh(8), in_specs=cut, out_specs=PartitionSpec(TENSOR),
        check_vma=False,
    )  # fmt: skip
    got = np.asarray(jax.jit(mapped)(logits), np.float32)
    assert got.shape == (share.num_own * 8, *tokens, V)
    np.testing.assert_array_equal(got[:num_rows], np.asarray(logits, np.float32))
    assert (got[num_rows:] == -np.inf).all()


V, OWN = 112, 2  # tokens, and devices


def spec_of(key: Key, rules_: Any = RULES, speculator: Any = None) -> Any:
    """Returns what a program in bfloat16 on two devices is compiled from."""
    sizes: dict[str, Any] = dict(
        vocab_size=V, num_attention_heads=8, hidden_size=24, intermediate_size=32
    )
    model, config = shard(llama, tiny.config(**sizes), mesh := make_mesh(OWN))
    model, dims = model._replace(speculator=speculator), config.dims | dict(param="bfloat16")
    at = shardings(model.params, dims, mesh)
    params = jax.tree.map(lambda x, at: x.update(sharding=at), abstract(model.params, dims), at)
    engine = tiny.engine_config(dtype="bfloat16", kv_dtype="bfloat16")
    built = build(model, config, engine, params, rules=rules_)
    return program_spec(built.program, params, key)


def on_a_device(spec: Any) -> list[Any]:
    """Returns the equations that each device runs."""
    (mapped,) = [
        eqn for eqn in equations(traced(spec))
        if eqn.primitive.name == "shard_map"
    ]  # fmt: skip
    return [*equations(mapped.params["jaxpr"])]


FN = with_logits_fn(RULES, logits_fn(lambda logits, row: logits))
STANDARD = ngram(1)._replace(rejection="standard")
USUAL, DRAFTED = Key("step", Bucket(5, 5, 1)), Key("step", Bucket(10, 5, 2, 1))
PROGRAMS = {
    "usual": (USUAL, RULES, None, 5),
    "a rule of the user": (USUAL, FN, None, 5),
    "exact drafts": (DRAFTED, RULES, ngram(1), 10),
    "standard drafts": (DRAFTED, RULES, STANDARD, 10),
    "logprobs": (Key("sample", SampleSize(5, True, 3)), RULES, None, 5),
    "prompt logprobs": (Key("prompt_logprobs", PromptLogprobsSize(9, 9, 3)), RULES, None, 9),
}


@pytest.mark.devices(2)
@pytest.mark.parametrize(
    ("key", "rules_", "speculator", "num"), PROGRAMS.values(), ids=PROGRAMS.keys()
)
def test_no_device_has_many_logits_of_all_rows(key, rules_, speculator, num, monkeypatch):
    """num: rows of logits."""
    monkeypatch.setattr(row_share, "MAX_SUM_BYTES", 0)
    eqns = on_a_device(spec_of(key, rules_, speculator))
    dealt = [eqn for eqn in eqns if eqn.primitive.name == "all_to_all"]
    (sent,) = (eqn.invars[0].aval for eqn in dealt)
    assert sent.dtype == jnp.bfloat16 and sent.shape[-1] == V // OWN
    rows = -(-num // OWN) if speculator is None else num // 2 // OWN * 2 + 2
    assert math.prod(sent.shape[:-1]) == rows * OWN
    shapes = [out.aval.shape for eqn in eqns for out in eqn.outvars if hasattr(out.aval, "shape")]
    of_logits = [math.prod(shape) // V for shape in shapes if V in shape]
    assert max(of_logits) == rows < num
    others = ("all_gather", "psum", "psum_invariant", "ppermute", "reduce_scatter")
    told = [eqn.outvars[0].aval.shape for eqn in eqns if eqn.primitive.name in others]
    assert told and not [shape for shape in told if V in shape or V // OWN in shape]


@pytest.mark.devices(2)
@pytest.mark.parametrize("limit", [5 * V * 2, 5 * V * 2 - 1])
def test_few_logits_are_exchanged_by_a_sum(limit, monkeypatch):
    """In bfloat16, of which 5 rows have just as many bytes."""
    monkeypatch.setattr(row_share, "MAX_SUM_BYTES", limit)
    eqns = on_a_device(spec_of(USUAL))
    names = [eqn.primitive.name for eqn in eqns]
    summed = [
        eqn.outvars[0].aval for eqn in eqns
        if eqn.primitive.name.startswith("psum") and V in eqn.outvars[0].aval.shape
    ]  # fmt: skip
    if limit == 5 * V * 2:
        assert "all_to_all" not in names
        assert [(aval.shape, aval.dtype) for aval in summed] == [((5, 1, V), jnp.bfloat16)]
    else:
        assert names.count("all_to_all") == 1 and not summed


@pytest.mark.slow
@compiles
def test_gpus_draw_by_the_kernel_of_one_between_two_exchanges():
    compiled, _ = compiled_by("aot_rows.py")
    assert compiled["found"] == {"all-to-all": 1, "kernel": 3, "all-reduce": 1}
    assert compiled["told"] == [["f32", 2, 9, 3]]  # of 9 rows a token and two flags


def test_one_device_exchanges_nothing():
    share, x = RowShare(5), jnp.zeros((5, 3))
    assert share.deal(x) is x and share.own((x, None))[0] is x and share.whole(x) is x
