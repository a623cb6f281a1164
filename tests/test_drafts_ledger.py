"""An engine that drafts compiles little more than one that does not."""

from typing import Any

import pytest

from jaxrunner.device.buckets import GPU_SIZES
from jaxrunner.device.program_spec import program_keys
from jaxrunner.models.llama import llama
from jaxrunner.programs.build import build
from jaxrunner.runner.model_runner import ModelRunner
from tests.support import tiny
from tests.support.drafters import DRAFTERS, with_itself_or_none, with_ngrams

KINDS = dict(eagle3=DRAFTERS["eagle3"], another=DRAFTERS["another"], ngram=with_ngrams)
KINDS["adaptive"] = with_itself_or_none
GPU: dict[str, Any] = dict(
    max_num_seqs=256, max_num_batched_tokens=8192, decode_buckets=GPU_SIZES, token_buckets=(),
    num_decode_steps=4, num_blocks=12,
)  # fmt: skip


def num_programs(model, config, params, *, all_rules: bool, **sizes: Any) -> int:
    """Returns how many programs a start compiles on a GPU, where admissions have three sizes."""
    built = build(model, config, tiny.engine_config(**GPU | sizes), params)
    runner = ModelRunner(built, params, trusted=True)
    keys = program_keys(runner.program, runner.buckets, all_rules=all_rules)
    return len(keys) + 3 - sum(key.name == "admit" for key in keys)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("all_rules", [False, True], ids=["usual", "all rules"])
@pytest.mark.parametrize("num_decode_steps", [1, 4])
def test_drafts_need_at_most_half_as_many_programs_more(kind, all_rules, num_decode_steps):
    rest: dict[str, Any] = dict(all_rules=all_rules, num_decode_steps=num_decode_steps)
    plain = num_programs(llama, *tiny.model_and_params(), **rest)
    most = 1.75 if kind == "adaptive" and all_rules else 1.5  # forward and draw are twice there
    assert plain <= num_programs(*KINDS[kind](), **rest) <= most * plain
