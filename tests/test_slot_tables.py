"""Tables of what a program knows of each request: a row is written when a request is admitted."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner import pytree
from jaxrunner.models.llama import llama
from jaxrunner.program.shapes import admission_spec, admit_sizes
from jaxrunner.programs.build import build
from jaxrunner.pytree import host_value, leaf
from jaxrunner.runner.model_runner import ModelRunner
from jaxrunner.sampling import RULES
from jaxrunner.slot_table import SlotTable
from jaxrunner.types import Array
from tests.support import tiny


@pytree.pytree
class Weights:
    """A list of numbers, and how many there are."""

    count: Array = leaf("R")
    values: Array = leaf("R own", jnp.float32)


def row(request) -> Weights:
    values = np.arange(len(request.token_ids), dtype=np.float32)[:3] + request.seed
    return host_value(Weights, count=np.int32(values.size), values=values)


TABLE = SlotTable("weights", Weights, row, dims=(("own", 3),))


def runner(model) -> ModelRunner:
    config, params = tiny.model_and_params()
    return ModelRunner(build(model, config, tiny.engine_config(), params), params)


def test_a_table_of_the_model_has_each_request_s_row_and_zeros_elsewhere():
    r = runner(llama._replace(tables=(TABLE,)))
    prompts = {"a": [1, 2], "b": [3, 4, 5, 6]}
    new = [tiny.new_request(n, p, blocks=[i], seed=10) for i, (n, p) in enumerate(prompts.items())]
    r.step(tiny.scheduled({n: len(p) for n, p in prompts.items()}, new)).get()
    table = r.state.tables["weights"]
    assert np.asarray(table.values)[[r.requests["a"], r.requests["b"]]].tolist() == [
        [10, 11, 0], [10, 11, 12],
    ]  # fmt: skip
    assert np.asarray(table.count).sum() == 5 and np.asarray(table.values).sum() == 54
    assert set(r.state.tables) == {rule.name for rule in RULES} | {"weights"}


def test_what_the_device_alone_writes_stays_as_it_is():
    """No admission carries it."""
    r = runner(llama._replace(tables=(TABLE._replace(row=None),)))
    ones = jax.tree.map(jnp.ones_like, r.state.tables["weights"])
    r.state = replace(r.state, tables=r.state.tables | {"weights": ones})
    r.step(tiny.scheduled({"a": 2}, [tiny.new_request("a", [1, 2], blocks=[0])])).get()
    table = r.state.tables["weights"]
    assert (np.asarray(table.values) == 1).all() and (np.asarray(table.count) == 1).all()
    assert all("weights" not in admission_spec(r.program, s)[1] for s in admit_sizes(r.program))


def test_the_layers_read_each_token_s_row():
    seen = []

    def embed(config, params, inputs):
        x = llama.embed(config, params, inputs)
        seen.append(inputs.tables["weights"].values.shape)
        return x * (1 + inputs.tables["weights"].values.sum(-1, keepdims=True).astype(x.dtype))

    r = runner(llama._replace(tables=(TABLE,), embed=embed))
    want = {}
    for seed in (0, 5):
        request = tiny.new_request("a", [1, 2, 3], blocks=range(4), seed=seed)
        want[seed] = tiny.generate(r, request, 4)
    assert seen and {shape[1:] for shape in seen} == {(3,)}
    assert want[0] != want[5]  # each request by its own row, in one program


def test_two_tables_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two slot tables or sampling rules are called 'seed'"):
        runner(llama._replace(tables=(TABLE._replace(name="seed"),)))
