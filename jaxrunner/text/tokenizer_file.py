"""A tokenizer.json, checked before `tokenizers` sees it, which ends the process at some files.

That library is Rust: where memory runs out, or a table would be too large, there is no exception.
Knows no JAX.
"""

import base64
from collections.abc import Iterator
import json
import math
from pathlib import Path
import re
from typing import Any

from jaxrunner.api.limits import (
    GROWTH,
    SIZES,
    TOKEN_CHARS,
    TOKENIZER_BYTES,
    TOKENIZER_PARTS,
    check_bytes,
)
from jaxrunner.api.validation import shown

# The sections that rewrite text; each may be one part, or a sequence of parts.
SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# How many characters become of one at most, by Unicode 17.
FORMS = dict(NFC=3, NFD=4, NFKC=18, NFKD=18)
LONGER = FORMS | dict(Lowercase=2, BertNormalizer=6, ByteLevel=4)
WRITERS = "Replace", "Prepend", "Precompiled"
MAX_ID = SIZES["vocab_size"]


def read(path: Path) -> str:
    """Returns the text of a tokenizer.json.

    Raises:
      ValueError: it is no JSON object, or holds more than a model's tokenizer does; names what.
    """
    check_bytes(path, TOKENIZER_BYTES)
    try:
        text = path.read_text(encoding="utf-8")
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a tokenizer ({error!s:.300}): fetch it again") from error
    if not isinstance(told, dict):
        raise ValueError(f"{path} is not a tokenizer, it holds no object: fetch it again")
    for name, token, token_id in _tokens(told):
        if isinstance(token, str) and len(token) > TOKEN_CHARS:
            raise ValueError(
                f"{path}: {name} has a token of {len(token)} characters, it may have "
                f"{TOKEN_CHARS}: fetch it again"
            )
        if type(token_id) is int and not 0 <= token_id < MAX_ID:
            raise ValueError(
                f"{path}: {name} has the id {shown(token_id)}, ids are from 0 to {MAX_ID - 1}: "
                "fetch it again"
            )
    for name in SECTIONS:
        _check_section(f"{path}: {name}", told.get(name))
    return text


def _tokens(told: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields where tokens stand, the tokens, and their ids; other kinds are for `tokenizers`."""
    model, added = told.get("model"), told.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict) and vocab:
        ids = [i for i in vocab.values() if type(i) is int] or [0]
        yield "vocab", max(vocab, key=len), max(ids)
        yield "vocab", "", min(ids)
    if isinstance(vocab, list) and vocab:
        pieces = [pair[0] for pair in vocab if isinstance(pair, list) and pair]
        yield "vocab", max((p for p in pieces if isinstance(p, str)), key=len, default=""), 0
        yield "vocab", "", len(vocab) - 1
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            yield "added_tokens", token.get("content"), token.get("id")


def _check_section(where: str, section: Any) -> None:
    """Checks how much longer a section can make a text, all its steps together."""
    growth, parts, count, form = 1, [section], 0, 1
    while parts:
        part, count = parts.pop(), count + 1
        if count > TOKENIZER_PARTS:
            raise ValueError(f"{where} has over {TOKENIZER_PARTS} parts: fetch it again")
        if isinstance(part, dict):
            kind, longer = str(part.get("type")), _growth(part)
            if kind in FORMS:  # a text that is in one of them becomes no longer by another
                longer, form = max(1, math.ceil(longer / form)), max(form, longer)
            elif longer > 1 or kind in WRITERS:
                form = 1
            growth *= longer
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if growth > GROWTH:
            raise ValueError(
                f"{where} can make a text more than {GROWTH} times as long, at "
                f"{shown(part)}: fetch it again"
            )


def _growth(part: dict[str, Any]) -> int:
    """Returns how many times longer a step makes a text at most, where it does by what it says."""
    kind, content, pattern = part.get("type"), part.get("content"), part.get("pattern")
    if kind == "Replace" and isinstance(content, str) and isinstance(pattern, dict):
        found, regex = pattern.get("String"), pattern.get("Regex")
        if isinstance(found, str) and found:
            return max(1, math.ceil(len(content) / len(found)))
        return max(1, len(content) + _may_be_empty(regex))
    if kind == "Prepend" and isinstance(part.get("prepend"), str):
        return max(1, len(part["prepend"]) // 4)
    if kind == "Precompiled" and isinstance(part.get("precompiled_charsmap"), str):
        return _longest_piece(part["precompiled_charsmap"])
    return LONGER.get(kind, 1) if isinstance(kind, str) else 1


def _may_be_empty(regex: Any) -> bool:
    """Whether a pattern may match between any two characters."""
    # Theirs is another syntax than Python's, and what looks around itself needs more than "".
    if not isinstance(regex, str) or re.search(r"\(\?[=!<]|\\[bBGzZAKX]|\[\[|&&|--", regex):
        return True
    try:
        return re.search(regex, "") is not None
    except (re.error, RecursionError, OverflowError):
        return True


def _longest_piece(charsmap: str) -> int:
    """Returns the longest replacement of a map as sentencepiece writes it: a trie, then texts."""
    try:
        blob = base64.b64decode(charsmap)
    except ValueError:
        return 1  # `tokenizers` refuses it
    pieces = blob[4 + int.from_bytes(blob[:4], "little") :].split(b"\0")
    return max(1, *(len(piece.decode(errors="replace")) for piece in pieces))
