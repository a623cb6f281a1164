"""Steps whose requests are all short: a narrower table of blocks, and the same tokens."""

from dataclasses import replace

import pytest

from jaxrunner import step
from jaxrunner.device.buckets import choose, step_buckets
from jaxrunner.device.program_spec import program_keys
from jaxrunner.kernels_pallas.attention.decode_plan import DEFAULT
from jaxrunner.ops.attention import gains_short
from jaxrunner.ops.backends import fused
from jaxrunner.program.bucket import SHORT_LEN, Bucket, MultiStepBucket
from jaxrunner.program.program import Program
from jaxrunner.programs.build import Built
from jaxrunner.programs.program_table import ProgramTable
from jaxrunner.runner import request_table
from jaxrunner.sampling import RULES
from tests.support import drafters, tiny
from tests.support.drafters import with_eagle, with_itself

LEN = 26  # tokens of a short request here; no multiple of a block
WIDE = tiny.config(hidden_size=64, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
ENGINE = tiny.engine_config(max_model_len=8192, block_size=64)
ONE, EIGHT = Bucket(1, 1, 1), Bucket(8, 8, 1)


def program(config=WIDE, **changes) -> Program:
    return Program(drafters.llama, config, replace(ENGINE, **changes), fused, RULES)


def without() -> tuple:
    """Returns the tiny model without drafts."""
    return drafters.llama, *tiny.model_and_params()


@pytest.fixture
def ran(monkeypatch):
    """Lets engines have buckets of short requests; returns the sizes that steps ran in."""
    found = []

    def buckets(self):
        program = self.program
        return step_buckets(
            program.engine, program.model.speculator, lambda bucket: bucket.num_rows <= 2
        )

    def chosen(self, key, get=ProgramTable.__getitem__):
        found.append(key.size)
        return get(self, key)

    monkeypatch.setattr(step, "SHORT_LEN", LEN)
    monkeypatch.setattr(request_table, "SHORT_LEN", LEN)
    monkeypatch.setattr(Built, "buckets", property(buckets))
    monkeypatch.setattr(ProgramTable, "__getitem__", chosen)
    return found


@pytest.mark.parametrize(
    "rule",
    [
        dict(temperature=0),
        pytest.param(dict(temperature=0.9, top_k=20), marks=pytest.mark.slow),
        pytest.param(dict(logprobs=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("made", [without, with_itself, with_eagle])
def test_tokens_are_those_of_a_whole_table(made, num_steps, rule, ran, monkeypatch):
    sizes = dict(num_decode_steps=num_steps, decode_buckets=(1, 2, 5), max_num_seqs=2)
    model, config, params = made()
    got, _, _ = drafters.run(model, config, params, rule, **sizes)
    kinds = {size.short for size in ran if isinstance(size, Bucket | MultiStepBucket)}
    assert kinds == ({False} if "logprobs" in rule else {False, True})
    monkeypatch.undo()
    assert got == drafters.run(model, config, params, rule, **sizes)[0]


def test_a_bucket_of_short_requests_precedes_the_one_of_all():
    short = ONE._replace(short=True)
    table = step_buckets(
        replace(ENGINE, decode_buckets=(1, 5)), gains_short=lambda bucket: bucket == ONE
    )
    assert table[:2] == (short, ONE)
    assert choose(table, [1], short=True) == short
    assert choose(table, [1]) == choose(table, [1], lambda bucket: bucket.short, short=True) == ONE
    assert not choose(table, [1, 1], short=True).short
    assert choose(table, [1], ragged=True, short=True).query_len == 0


def test_rare_programs_have_no_table_of_short_requests():
    buckets = ONE._replace(short=True), ONE
    made = program(num_decode_steps=4)
    usual = program_keys(made, buckets, all_rules=False)
    assert {key.name for key in usual if getattr(key.size, "short", False)} == {
        "step", "multi_step",
    }  # fmt: skip
    rare = set(program_keys(made, buckets, all_rules=True)) - set(usual)
    assert rare and not any(getattr(key.size, "short", False) for key in rare)


def test_one_request_gains_where_a_cluster_reads_all_of_it():
    assert SHORT_LEN == DEFAULT.cluster * DEFAULT.block_kv
    assert gains_short(program(), ONE)
    assert gains_short(program(), Bucket(4, 1, 4, 3))
    assert not gains_short(program(), EIGHT)
    assert not gains_short(program(max_model_len=SHORT_LEN), ONE)  # whose table is narrow anyway
    assert not gains_short(program(kv_dtype="float8_e4m3fn"), ONE)
    assert not gains_short(program(tiny.config(head_dim=8)), ONE)
