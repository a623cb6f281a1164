"""Prompts: every form is read, every bad one is refused, and one bad prompt spoils no other."""

import numpy as np
import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models, pre_tokenizers

from jaxrunner.text.prompts import check_prompt, parse_prompts
from jaxrunner.text.tokenizer import Tokenizer

# Two tokens, with the ids that the letters have in ASCII.
INNER = Inner(models.WordLevel({"a": 97, "b": 98}, unk_token="a"))
INNER.pre_tokenizer = pre_tokenizers.Split("", "isolated")
LETTERS = Tokenizer(INNER)


@pytest.mark.parametrize(
    "prompts, want",
    [
        ("ab", [("ab", [97, 98])]),
        ("", [("", [])]),
        ([], []),
        (("a", "b"), [("a", [97]), ("b", [98])]),
        ({"prompt": "a"}, [("a", [97])]),
        ({"prompt_token_ids": [1, 2]}, [(None, [1, 2])]),
        ({"prompt": None, "prompt_token_ids": (1, 2)}, [(None, [1, 2])]),
        ({"prompt_token_ids": np.array([1, 2])}, [(None, [1, 2])]),
        ({"prompt_token_ids": [], "prompt": "known"}, [("known", [])]),
        (["a", {"prompt_token_ids": [np.int64(3)]}], [("a", [97]), (None, [3])]),
    ],
)
def test_prompts_are_read_in_every_form(prompts, want):
    resolved = [prompt.resolve(LETTERS) for prompt in parse_prompts(prompts)]
    assert resolved == want
    assert all(type(i) is int for _, ids in resolved for i in ids)


@pytest.mark.parametrize(
    "bad, error, message",
    [
        (3.5, TypeError, "a prompt must be a str, .* got 3.5 of float"),
        (None, TypeError, "a prompt must be a str, .* got None"),
        ([1, 2], TypeError, "a prompt must be a str, .* of list"),
        (b"a", TypeError, "a prompt must be a str, .* of bytes"),
        ({}, ValueError, "prompt is a dict without a prompt: set prompt or prompt_token_ids"),
        ({"prompt": None}, ValueError, "prompt is a dict without a prompt"),
        ({"prompt": 3}, TypeError, "prompt must be a str, got 3 of int"),
        ({"text": "a"}, ValueError, "prompt has unknown keys .'text'.: use prompt or"),
        ({"prompt": "a", "multi_modal_data": {}}, ValueError, "prompt has unknown keys"),
        ({"prompt_token_ids": "ab"}, TypeError, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": 3}, TypeError, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": [1, 2.0]}, TypeError, r"prompt_token_ids\[1\] must be an integer"),
        ({"prompt_token_ids": [True]}, TypeError, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": [None]}, TypeError, r"prompt_token_ids\[0\] must be an integer"),
        ({"prompt_token_ids": np.ones((1, 2), int)}, TypeError, "must be an integer, got"),
    ],
)
def test_a_bad_prompt_fails_alone(bad, error, message):
    first, middle, last = parse_prompts(["a", bad, "b"])
    assert first.resolve(LETTERS) == ("a", [97])
    assert last.resolve(LETTERS) == ("b", [98])
    with pytest.raises(error, match=message):
        middle.resolve(LETTERS)


@pytest.mark.parametrize(
    "prompts, message",
    [
        ([1, 2, 3], "prompts is a list of integers, which may be one prompt or many: for one"),
        ((np.int32(1),), "prompts is a list of integers"),
        (3, "prompts must be a str, .* or a list of them, got 3 of int"),
        (None, "or a list of them, got None"),
        (b"ab", "or a list of them, got b'ab' of bytes"),
        ({"a", "b"}, "or a list of them, got .* of set"),
    ],
)
def test_prompts_that_are_no_prompts_are_refused(prompts, message):
    with pytest.raises(TypeError, match=message):
        parse_prompts(prompts)


def test_text_needs_a_tokenizer():
    (prompt,) = parse_prompts("a")
    with pytest.raises(ValueError, match="leaves no tokenizer: pass prompt_token_ids"):
        prompt.resolve(None)
    (prompt,) = parse_prompts({"prompt_token_ids": [5]})
    assert prompt.resolve(None) == (None, [5])


@pytest.mark.parametrize(
    "ids, error, message",
    [
        ([], ValueError, "prompt has 0 tokens, a model needs 1 to go on from: pass some text"),
        (
            [1] * 70,
            ValueError,
            "prompt has 70 tokens, max_model_len=64 leaves room for 63: shorten it or raise",
        ),
        ([1] * 64, ValueError, "prompt has 64 tokens, max_model_len=64 leaves room for 63"),
        *[
            ([0, bad], ValueError, rf"prompt_token_ids\[1\]={bad} is out of range, .* 0 to 99")
            for bad in (-(2**31), -1, 100, 2**31 - 1, 2**70)
        ],
        ([0, 1.5], TypeError, r"prompt_token_ids\[1\] must be an integer, got 1.5 of float"),
        ([True], TypeError, r"prompt_token_ids\[0\] must be an integer, got True of bool"),
    ],
)
def test_ids_that_no_model_takes_are_refused(ids, error, message):
    with pytest.raises(error, match=message):
        check_prompt(ids, vocab_size=100, max_model_len=64)


@pytest.mark.parametrize("ids", [[0], [99] * 63, np.arange(63), (1, 2)])
def test_ids_that_fit_are_taken(ids):
    check_prompt(ids, vocab_size=100, max_model_len=64)
