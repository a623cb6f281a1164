"""Programs that draft otherwise are kept under other names."""

from typing import Any

import pytest

from jaxrunner.models.llama import llama
from jaxrunner.programs.build import Built
from jaxrunner.speculators.ngram import ngram
from tests.support.kept_programs import built, drafted


@pytest.fixture
def kept(monkeypatch):
    """Programs are kept here, whatever JAX itself keeps for the tests."""
    monkeypatch.setattr("jaxrunner.programs.build.jax_keeps_its_own", lambda: False)


def context(programs: Built) -> str:
    assert programs.cache is not None
    return programs.cache._context


@pytest.mark.parametrize(
    "given",
    [
        dict(num_drafts=3),
        dict(draft_sample_method="greedy"),
        dict(draft_sample_method="probabilistic"),
        dict(rejection="standard"),
        dict(rejection="synthetic", rates=(0.5, 0.25)),
    ],
    ids=["num_drafts", "greedy", "probabilistic", "rejection", "rates"],
)
def test_programs_that_draft_otherwise_are_others(tmp_path, kept, given: dict[str, Any]):
    same, other = context(drafted(tmp_path)), context(drafted(tmp_path, **given))
    assert same == context(drafted(tmp_path)) != other
    assert " at 0x" not in same + other  # which no other process has


def test_sizes_of_n_grams_tell_programs_apart(tmp_path, kept):
    few, more = (
        context(built(tmp_path, llama._replace(speculator=ngram(2, max_n=n)))) for n in (2, 3)
    )
    assert few != more and " at 0x" not in few + more
