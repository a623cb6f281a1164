"""Objects whose own methods raise or lie are refused by the name of their field."""

from dataclasses import replace
from typing import Any

import pytest

from jaxrunner import SamplingParams, StructuredOutputsParams
from jaxrunner.engine.requested_prompts import read_requested
from jaxrunner.loading import tensors
from jaxrunner.pooling.pairs import read_pairs
from tests.attack.values import HostileText
from tests.support import tiny


class Unreadable:
    """Raises when it is looked through."""

    def __iter__(self) -> Any:
        raise ArithmeticError("hostile")


def test_what_cannot_be_looked_through_is_named():
    bad: Any = Unreadable()
    with pytest.raises(TypeError, match="extra_args must be a dict"):
        SamplingParams(extra_args=bad)
    with pytest.raises(TypeError, match=r"structured_outputs\.choice cannot be read as a list"):
        StructuredOutputsParams(choice=bad)
    for ids in (bad, b"1"):
        with pytest.raises(TypeError, match="ids must be token ids or one"):
            tiny.tokenizer().decode(ids)


def test_tensors_that_end_in_an_error_are_named():
    class Half:
        def __getitem__(self, i: int) -> Any:
            raise ArithmeticError("hostile")

    with pytest.raises(TypeError, match="weights cannot be read to its end: ArithmeticError"):
        tensors.read("weights", Half())


def test_a_text_is_what_it_holds():
    assert StructuredOutputsParams(regex=HostileText("a")) == StructuredOutputsParams(regex="a")
    assert tiny.tokenizer().encode(HostileText("AB")) == [0, 1]
    [(first, _)] = read_pairs(HostileText("a"), ["b"])
    assert (first, len(first)) == ("a", 1)


def test_sizes_of_an_engine_name_a_policy_that_is_none():
    with pytest.raises(ValueError, match="policy must be one of"):
        replace(tiny.engine_config(), policy="")


def test_what_stands_beside_no_prompt_is_looked_at_too():
    one: Any = SamplingParams()
    assert read_requested([], one, None) == []
    with pytest.raises(TypeError, match=r"priority\[0\] must be an integer"):
        read_requested([], one, "high")
