"""A tokenizer answers what users of transformers' call, as theirs does."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import embedded
from jaxrunner.text.tokenizer import Tokenizer
from tests.support import tiny

TEXTS = ["def f(x):\n    return x", "naïve café 日本語", ""]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{{ mood }}"
)
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_folder(embedded.PATH)


@pytest.fixture(scope="module")
def theirs():
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(embedded.PATH))


def test_answers_are_those_of_transformers(ours, theirs):
    for text in TEXTS:
        ids = theirs.encode(text)
        for special in (True, False):
            want = theirs(text, add_special_tokens=special)
            got = ours(text, add_special_tokens=special)
            assert (got.input_ids, got.attention_mask) == (want.input_ids, want.attention_mask)
        assert ours.tokenize(text) == theirs.tokenize(text)
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        tokens = theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(tokens) == ids
        assert ours.batch_decode([ids, ids[:3]]) == theirs.batch_decode(
            [ids, ids[:3]], skip_special_tokens=True
        )
    assert ours.get_vocab() == theirs.get_vocab() and len(ours) == len(theirs)
    assert ours.get_added_vocab() == theirs.get_added_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(theirs.all_special_ids) == ours.all_special_ids
    assert sorted(theirs.all_special_tokens) == sorted(ours.all_special_tokens)
    assert ours.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert ours.decode(300) == ours.decode(np.int64(300)) == theirs.decode([300])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("fields", [dict(padding=True), dict(padding="max_length", max_length=20),
                                    dict(truncation=True, max_length=4)], ids=str)  # fmt: skip
def test_batches_are_padded_and_cut_as_by_transformers(ours, theirs, side, fields):
    theirs.pad_token = theirs.pad_token or theirs.eos_token
    want = theirs(TEXTS, padding_side=side, **fields)
    got = ours(TEXTS, padding_side=side, **fields)
    assert got["input_ids"] == want["input_ids"]
    assert got["attention_mask"] == want["attention_mask"]
    assert list(ours(TEXTS, return_attention_mask=False)) == ["input_ids"]


def test_conversations_are_rendered_as_by_transformers(ours, theirs):
    fields: dict[str, Any] = dict(chat_template=TEMPLATE, add_generation_prompt=True, mood="glad")
    want = theirs.apply_chat_template(TALK, tokenize=False, **fields)
    assert ours.apply_chat_template(TALK, tokenize=False, **fields) == want
    ids = ours.apply_chat_template(TALK, **fields)
    assert ids == ours.encode(want, add_special_tokens=False)
    assert ours.apply_chat_template([TALK, TALK], **fields) == [ids, ids]
    assert ours.apply_chat_template(TALK, return_dict=True, **fields)["input_ids"] == ids
    assert ours.apply_chat_template(TALK, **fields, padding=False) == ids
    with pytest.raises(ValueError, match="return_tensors is not supported here: call the token"):
        ours.apply_chat_template(TALK, return_tensors="np", **fields)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: t(3), "text must be a list, each element a string, got 3"),
        (lambda t: t(["a", 3]), "text to encode must be a str, got int"),
        (lambda t: t("a", return_tensors="pt"), "return_tensors='pt' is not supported: lists"),
        (lambda t: t("a", truncation=True), "max_length is missing, which padding or truncation"),
        (lambda t: t("a", padding="most"), "padding must be False, True, 'longest', .*got 'most'"),
        (lambda t: t("a", padding_side="top"), "padding_side must be 'right' or 'left', got 'top'"),
        (lambda t: t("a", max_length=0), "max_length=0 is out of range"),
        (lambda t: t("a", truncation=3), "truncation must be True or False, got 3"),
        (lambda t: t.convert_ids_to_tokens(10**6), "ids=1000000 is no token's: ids end at 4096"),
        (lambda t: t.convert_ids_to_tokens([1, "a"]), r"ids\[1\] must be an integer"),
        (lambda t: t.convert_ids_to_tokens(-1), "ids=-1 is out of range"),
        (lambda t: t.convert_tokens_to_ids([3]), r"tokens\[0\] must be a string"),
        (lambda t: t.decode(["a"]), r"ids must be token ids or one, got \['a'\]: pass integers"),
        (lambda t: t.decode(1.5), "ids must be token ids or one, got 1.5"),
        (lambda t: t.decode([65.5]), r"ids must be token ids or one, got \[65.5\]"),
        (lambda t: t.apply_chat_template(3), "messages must be a list of dicts, got int"),
        (lambda t: t.apply_chat_template(TALK, tokenize=3), "tokenize must be True or False"),
        (lambda t: t.apply_chat_template(TALK), "chat_template is missing from the checkpoint"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ours, call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(ours)


def test_padding_needs_a_token(ours):
    bare = Tokenizer(Tokenizer.from_folder(embedded.PATH).inner)
    with pytest.raises(ValueError, match="padding needs a pad token, the tokenizer has none"):
        bare(["a", "a b c"], padding=True)
    assert bare(np.array(["a", "b"]).tolist(), padding=True).input_ids
    assert bare([], padding=True).input_ids == []


def test_flags_that_are_none_are_named():
    tokenizer: Any = tiny.tokenizer()
    with pytest.raises(TypeError, match="add_special_tokens must be True or False, got 1"):
        tokenizer.encode("a", 1)
    with pytest.raises(TypeError, match="skip_special_tokens must be True or False, got 'no'"):
        tokenizer.decode([1], "no")
