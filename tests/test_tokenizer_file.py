"""A tokenizer.json or a text that would end the process is refused before anything is done."""

import base64
import itertools
import json
from pathlib import Path
import sys
import time
from typing import Any
import unicodedata

import pytest
from tokenizers import decoders, normalizers

from jaxrunner import embedded
from jaxrunner.api import limits
from jaxrunner.text import pattern_trial, tokenizer_file
from jaxrunner.text.prompts import parse_prompts
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.text.tokenizer_file import read
from tests.support import tiny


def told() -> dict[str, Any]:
    return json.loads((embedded.PATH / "tokenizer.json").read_text(encoding="utf-8"))


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return dict(type="Replace", pattern=pattern, content=content)


def sequence(name: str, *parts: Any) -> dict[str, Any]:
    return {name: dict(type="Sequence", **{f"{name}s": [*parts]})}


def charsmap(*texts: str) -> str:
    trie = bytes(8)
    blob = len(trie).to_bytes(4, "little") + trie + "\0".join(texts).encode()
    return base64.b64encode(blob).decode()


def token(token_id: Any, content: str = "<more>") -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return dict(added_tokens=[dict(id=token_id, content=content, special=True, **flags)])


def vocab(**more: int) -> dict[str, Any]:
    model = told()["model"]
    return dict(model=model | dict(vocab=model["vocab"] | more))


LONG = "can make a text more than 64 times as long, at "
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "an id of a token": (vocab(more=2 * 10**8), "vocab has the id 200000000, ids are from 0 to"),
    "an id below zero": (vocab(more=-1), "vocab has the id -1, ids are from 0 to 4194303"),
    "an added id": (token(2 * 10**8), "added_tokens has the id 200000000, ids are from 0"),
    "a long token": (vocab(**{"a" * 5000: 3}), "vocab has a token of 5000 characters, it may have"),
    "a long added token": (token(3, "a" * 5000), "added_tokens has a token of 5000 characters"),
    "unigram": (
        dict(model=dict(type="Unigram", vocab=[["a" * 5000, 0.0]], unk_id=0)),
        "vocab has a token of 5000 characters",
    ),
    "decoder": (sequence("decoder", *[replace("a" * 9, String="a")] * 3), f"decoder {LONG}"),
    "normalizer": (sequence("normalizer", *[replace("a" * 9, Regex="a")] * 3), LONG),
    "between all": (sequence("normalizer", *[replace("b", Regex="x*")] * 7), LONG),
    "look-around": (sequence("normalizer", *[replace("b", Regex="(?=a)")] * 7), LONG),
    "theirs alone": (sequence("normalizer", *[replace("b", Regex=r"\p{L}*")] * 7), LONG),
    "of nothing": (dict(normalizer=replace("a" * 99, String="")), LONG),
    "prepend": (dict(normalizer=dict(type="Prepend", prepend="a" * 10**6)), LONG),
    "charsmap": (
        dict(normalizer=dict(type="Precompiled", precompiled_charsmap=charsmap("a", "b" * 99))),
        LONG,
    ),
    "normal forms": (
        sequence("normalizer", dict(type="NFKC"), replace("\ufdfa", String=" "), dict(type="NFKD")),
        LONG,
    ),
    "many parts": (
        dict(post_processor=dict(type="TemplateProcessing", single=[{"A": 1}] * 10**4)),
        "post_processor has over 10000 parts: fetch it again",
    ),
}


@pytest.mark.parametrize(("changes", "match"), HOSTILE.values(), ids=HOSTILE.keys())
def test_what_would_end_the_process_is_refused(changes, match, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(told() | changes))
    start = time.monotonic()
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{match}"):
        Tokenizer.from_folder(tmp_path)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("form", tokenizer_file.FORMS)
def test_normal_forms_are_as_much_longer_as_said(form):
    longest = max(len(unicodedata.normalize(form, chr(c))) for c in range(sys.maxunicode + 1))
    assert longest == tokenizer_file.FORMS[form]


def test_other_steps_are_at_most_as_much_longer_as_said():
    steps = dict(Lowercase=normalizers.Lowercase(), BertNormalizer=normalizers.BertNormalizer())
    steps |= dict(ByteLevel=normalizers.ByteLevel())
    for name, step in steps.items():
        chars = ("\u0130", "\u4e2d", "\U0001d160", "\U00020000", "a")
        assert max(len(step.normalize_str(c)) for c in chars) <= tokenizer_file.LONGER[name], name


def split(regex: str) -> dict[str, Any]:
    return dict(type="Split", pattern=dict(Regex=regex), behavior="Isolated", invert=False)


BACKTRACKING = {
    "exponential": (
        dict(pre_tokenizer=split("(x+x+)+y")),
        "pre_tokenizer fails .* for 'x' repeated to 64 characters, its patterns backtrack: "
        "fetch it again, or write them without",
    ),
    "of a group": (dict(normalizer=replace("", Regex="((xy)+)+z")), "normalizer fails .* for 'xy'"),
    "cube": (
        dict(pre_tokenizer=split("x*x*[yz]")),
        "pre_tokenizer takes over 0.3 s for 'x'",
    ),
    "long": (
        dict(pre_tokenizer=split("x" * 16385)),
        "has a pattern of 16385 characters, it may have 16384: fetch it again",
    ),
}


@pytest.mark.parametrize(("changes", "match"), BACKTRACKING.values(), ids=BACKTRACKING.keys())
def test_patterns_that_backtrack_are_refused(changes, match, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(told() | changes))
    start = time.thread_time()
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{match}"):
        Tokenizer.from_folder(tmp_path)
    assert time.thread_time() - start < 10


def test_a_pause_of_the_machine_refuses_no_pattern(monkeypatch, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(told() | dict(pre_tokenizer=split("x+y"))))
    clock = iter([0.0, 9.0] * (pattern_trial.TRIES - 1) + [0.0] * 100_000)
    monkeypatch.setattr(pattern_trial.time, "thread_time", lambda: next(clock))
    assert Tokenizer.from_folder(tmp_path).encode("xxy")
    monkeypatch.setattr(pattern_trial.time, "thread_time", itertools.count(0, 9).__next__)
    with pytest.raises(ValueError, match=r"takes over 0\.3 s for 'a'"):
        Tokenizer.from_folder(tmp_path)


def test_patterns_of_models_are_taken(tmp_path: Path):
    of_llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    thousands = r"\d{1,3}(?=(?:\d{3})*\b)"
    for pattern in (of_llama3, thousands):
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(told() | dict(pre_tokenizer=split(pattern)))
        )
        start = time.thread_time()
        assert Tokenizer.from_folder(tmp_path).encode("x = 1000")
        assert time.thread_time() - start < 2


FILES = {
    "large": (b" " * (2**27 + 1), "must be at most 128 MiB, got 134217729 bytes"),
    "nested": (b'{"a":' * 99_999, "tokenizer.json is not a tokenizer .*: fetch it again"),
    "no object": (b"[1]", "is not a tokenizer, it holds no object: fetch it again"),
}


@pytest.mark.parametrize(("data", "match"), FILES.values(), ids=FILES.keys())
def test_a_file_that_is_none_is_refused(data, match, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError, match=match):
        Tokenizer.from_folder(tmp_path)


def test_what_tokenizers_of_models_do_is_taken(tmp_path: Path):
    usual = [
        normalizers.Prepend("▁"), normalizers.Replace(" ", "▁"), normalizers.NFC(),
        normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(),
    ]  # fmt: skip
    kept = [replace(" ", Regex=" {2,}"), replace("'", Regex="[\u2018\u2019]")] * 4
    steps = [json.loads(part.__getstate__()) for part in usual] + kept
    undo = json.loads(decoders.Replace("▁", " ").__getstate__())
    path = tmp_path / "tokenizer.json"
    pieces = dict(type="Precompiled", precompiled_charsmap=charsmap("ﷺ" * 18, "fi"))
    for changes in (
        sequence("normalizer", *steps) | sequence("decoder", undo, dict(type="Fuse")),
        dict(normalizer=pieces, pre_tokenizer=dict(type="Metaspace", replacement="▁")),
    ):
        path.write_text(json.dumps(told() | changes))
        assert read(path) == path.read_text(encoding="utf-8")


def test_a_text_that_cannot_fit_is_not_split():
    tokenizer, longest = tiny.tokenizer(), 1
    text = "a" * (limits.SHORT_TEXT + 1)
    assert tokenizer.longest_token == longest
    assert len(tokenizer.encode(text[:-1], max_tokens=1)) == limits.SHORT_TEXT
    assert len(tokenizer.encode(text, max_tokens=len(text))) == len(text)
    match = r"the text has 131073 characters, and 9 tokens, .* have at most 9: shorten it or raise"
    with pytest.raises(ValueError, match=match):
        tokenizer.encode(text, max_tokens=9)
    with pytest.raises(ValueError, match=match):
        parse_prompts(text)[0].resolve(tokenizer, 9)
    start = time.monotonic()
    with pytest.raises(ValueError, match="has 50000000 characters, at most 8388608 can be split"):
        tokenizer.encode("a" * 50_000_000)
    assert time.monotonic() - start < 1
