"""A byte-level BPE tokenizer for Python source, and token streams of documents. Knows no JAX."""

from collections.abc import Sequence
import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"  # before and after each document
CUT_LEN = 400  # characters, on average, between two cuts

# A newline and an indentation stand alone: a prompt that ends in one is cut as the corpus is.
PIECES = r"\n|(?<=\n)[ \t]+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    """Learns a vocabulary; token 0 is `END`."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    tokenizer.post_processor = begin
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_len: int) -> None:
    """Writes the two files that Hugging Face's tokenizers are loaded from."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def stream(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Returns the documents' tokens with `END` before, between and after them, int32."""
    end = tokenizer.encode(END, add_special_tokens=False).ids
    encoded = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return np.concatenate([end, *(e.ids + end for e in encoded)]).astype(np.int32)


def shuffled_stream(tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> np.ndarray:
    """Returns `stream` of the documents in random order, each cut at random characters first.

    A prompt may end anywhere, also within what would be one token: cuts teach the model to go on.
    """
    rng = np.random.default_rng(seed)
    end = tokenizer.encode(END, add_special_tokens=False).ids
    order: list[int] = rng.permutation(len(texts)).tolist()
    cut = [_cut(texts[i], rng) for i in order]
    encoded = iter(tokenizer.encode_batch(list(itertools.chain(*cut)), add_special_tokens=False))
    ids = [np.concatenate([next(encoded).ids for _ in pieces] + [end]) for pieces in cut]
    return np.concatenate([end, *ids]).astype(np.int32)


def openings(tokenizer: Tokenizer, stream: np.ndarray) -> np.ndarray:
    """Returns the places in a stream where a line that is neither indented nor empty begins."""
    size = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in size], skip_special_tokens=False)
    newline = np.asarray([text == "\n" for text in texts], np.bool_)
    flush = np.asarray([not text[:1].isspace() and text != END for text in texts], np.bool_)
    return 1 + np.flatnonzero(newline[stream[:-1]] & flush[stream[1:]]).astype(np.int32)


def _cut(text: str, rng: np.random.Generator) -> list[str]:
    places = np.sort(rng.integers(0, len(text), len(text) // CUT_LEN))
    ends = [0, *places.tolist(), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends) if a < b]
