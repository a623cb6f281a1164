"""Tokenizers to constrain, and random walks along the masks of a grammar."""

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.text.grammar_compiler import Grammar, GrammarCompiler
from jaxrunner.text.tokenizer import Tokenizer

SPECIAL = ["<s>", "</s>", "<pad>", "<|end|>", "<unk>"]
EOS = (1, 3)
BUDGET = 120  # random tokens, before a walk takes what closes
ENDLESS = 4000


class Vocab(NamedTuple):
    """A tokenizer, the width of logits wider than it, and which tokens close sooner."""

    tokenizer: Tokenizer
    width: int
    order: np.ndarray
    compiler: GrammarCompiler

    def grammar(self, **fields: Any) -> Grammar:
        return self.compiler.submit(StructuredOutputsParams(**fields)).result()

    def row(self) -> np.ndarray:
        return np.full(-(-self.width // 32), -1, np.int32)

    def mask(self, grammar: Grammar) -> np.ndarray:
        row = self.row()
        grammar.fill(row)
        return row

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)


def source_text() -> list[str]:
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))
    return [path.read_text("utf-8", "replace") for path in files]


def byte_level(size: int) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(source_text()[: None if size > 10_000 else 40], trainer)
    return inner


def sentencepiece() -> tokenizers.Tokenizer:
    """Returns a BPE of words with a leading block, whose other bytes have tokens of their own."""
    pieces = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256)), *map(chr, range(33, 127)), "▁", "é"]
    pairs = [("▁", "a"), ("e", "r"), ("▁", '"'), ("▁", "▁"), ("a", "b"), ('"', ":"), ("▁▁", "▁▁")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in pairs)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab, pairs, byte_fallback=True, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.add_special_tokens(SPECIAL)
    return inner


def vocab_of(inner: tokenizers.Tokenizer, **limits: Any) -> Vocab:
    tokenizer = Tokenizer(inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    ranks = {'"': 0, "}": 1, "]": 2, "0": 3}
    texts = [inner.decode([i], skip_special_tokens=False) for i in range(len(tokenizer))]
    order = np.array([ranks.get(text, 4 + len(text.encode())) for text in texts])
    width = len(tokenizer) + 37  # not a multiple of 32, and wider than the tokenizer
    compiler = GrammarCompiler(tokenizer, vocab_size=width, eos_token_ids=EOS, **limits)
    return Vocab(tokenizer, width, order, compiler)


def allowed(row: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def choose(vocab: Vocab, ids: np.ndarray, rng: np.random.Generator, closing: bool) -> int:
    if not closing:
        return int(rng.choice(ids))
    return int(ids[0] if ids[0] in EOS else ids[np.argmin(vocab.order[ids])])


def walk(vocab: Vocab, grammar: Grammar, rng: np.random.Generator) -> str:
    """Returns the text of one walk to an EOS, and checks the masks on the way."""
    row, taken = vocab.row(), []
    while not grammar.finished:
        grammar.fill(row)
        ids = allowed(row)
        ends = ids[ids < len(SPECIAL)].tolist()
        assert ends in ([], [*EOS]) and ids[-1] < len(vocab.tokenizer), ids
        assert bool(ends) == grammar.is_accepting
        taken.append(choose(vocab, ids, rng, len(taken) > BUDGET))
        assert grammar.accept(taken[-1:]) and grammar.error is None
        assert len(taken) < ENDLESS
    return vocab.text(taken)


def small_vocab() -> Iterator[Vocab]:
    """Yields a vocabulary of 1,000 byte-level tokens, for a fixture."""
    pytest.importorskip("llguidance")
    made = vocab_of(byte_level(1000))
    yield made
    made.compiler.close()


def is_alive(vocab: Vocab, text: str, **fields: Any) -> bool:
    """Returns whether a grammar of these fields takes a text, whole."""
    grammar = vocab.grammar(**fields)
    ids = vocab.tokenizer.encode(text, add_special_tokens=False)
    return grammar.accept([*ids, EOS[0]])
