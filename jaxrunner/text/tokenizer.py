"""Text to token ids and back, by a checkpoint's tokenizer.json. Knows no JAX."""

from collections.abc import Iterable, Sequence
import functools
import json
import numbers
import operator
from pathlib import Path
from typing import Any

import tokenizers

from jaxrunner.api.limits import check_text
from jaxrunner.api.validation import check_unicode, shown
from jaxrunner.errors import of_foreign_code
from jaxrunner.hf_config import read_json
from jaxrunner.text import pattern_trial, tokenizer_file
from jaxrunner.text.tokenizer_names import HuggingFaceNames

BROKEN = "\ufffd"  # the text of a decoder for bytes that are no character, or not one yet
OTHER_FORMATS = ("tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "tekken.json")


class Tokenizer(HuggingFaceNames):
    """A `tokenizers.Tokenizer`, at `inner`, with the special tokens and the chat template."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
    ):
        # Files may ask for the length or padding of some batch in training.
        inner.no_truncation()
        inner.no_padding()
        self.inner = inner
        self.bos_token, self.eos_token, self.pad_token = bos_token, eos_token, pad_token
        self.chat_template = chat_template
        self.bos_token_id = _token_id(inner, "bos_token", bos_token)
        self.eos_token_id = _token_id(inner, "eos_token", eos_token)
        self.pad_token_id = _token_id(inner, "pad_token", pad_token)
        added = inner.get_added_tokens_decoder()
        self._texts: dict[int, str] = {}
        self._whole_texts: dict[int, str] = {}
        # Bytes side by side; other decoders look at a token's neighbours.
        self._joins_bytes = isinstance(inner.decoder, tokenizers.decoders.ByteLevel)
        self.added = {i: token.content for i, token in added.items()}  # their texts
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Reads a folder as Hugging Face's libraries save one.

        Raises:
          FileNotFoundError: it has no tokenizer.json.
          ValueError: a file is broken.
        """
        folder = Path(path)
        config = _read_optional(folder / "tokenizer_config.json")
        tokens = _read_optional(folder / "special_tokens_map.json") | {
            name: token for name, token in config.items() if token is not None
        }
        return cls(
            _read_tokenizer(folder),
            bos_token=_content(tokens, "bos_token"),
            eos_token=_content(tokens, "eos_token"),
            pad_token=_content(tokens, "pad_token"),
            chat_template=_chat_template(folder, config),
        )

    def __len__(self) -> int:
        return self.vocab_size

    def __contains__(self, token_id: int) -> bool:
        """Whether an id is that of a token; a model's logits may be wider than its vocabulary."""
        return 0 <= token_id < 2**32 and self.inner.id_to_token(int(token_id)) is not None

    @property
    def vocab_size(self) -> int:
        """Tokens there are, added ones included; the logits may be wider."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, at most: those of bytes may be more than of a text."""
        return max(map(len, self.inner.get_vocab()), default=1)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the ids of a text. max_tokens: that there is room for, where that is known.

        Raises:
          TypeError, ValueError: it is not a text, or too long, or the tokenizer fails.
        """
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a str, got {type(text).__name__}: pass a str")
        text = str.__str__(text)  # of a class of its user's, what it holds
        check_text(text, lambda: self.longest_token, max_tokens)
        if not text.isascii():
            check_unicode("text", text)
        try:
            return self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            _check_flag("add_special_tokens", add_special_tokens)
            raise ValueError(
                f"the tokenizer cannot encode the text: {of_foreign_code(error)}"
            ) from error

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Returns the ids of two texts that are read together, and how many go with the first.

        Raises:
          TypeError, ValueError: one is not a text, or too long, or the tokenizer fails.
        """
        for text in (first, second):
            self.encode(text)  # which checks it
        found = self.inner.encode(str.__str__(first), str.__str__(second))
        return found.ids, found.type_ids.index(1) if 1 in found.type_ids else len(found.ids)

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token by itself."""
        if token_id not in self._texts:
            self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return self._texts[token_id]

    def whole_text(self, token_id: int) -> str:
        """Returns what a token adds to any text of whole characters; "" where that depends."""
        text = self._whole_texts.get(token_id)
        if text is None:
            known = self._joins_bytes and token_id not in self.special_ids
            text = self.token_text(token_id) if known else ""
            self._whole_texts[token_id] = text = "" if BROKEN in text else text
        return text

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids, or of one; an id that no token has is left out.

        Raises:
          TypeError: there is another thing among them; or what `join` does.
        """
        some: Any = [ids] if isinstance(ids, numbers.Integral) else ids
        some = None if isinstance(ids, bytes | bytearray) else some  # whose numbers are no tokens
        try:
            known = [i for i in map(operator.index, some) if i in self]
        except Exception as error:  # of whatever object it is
            raise TypeError(
                f"ids must be token ids or one, got {shown(ids)}: pass integers"
            ) from error
        return self.join(known, skip_special_tokens)

    def join(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Returns the text of ids that tokens have.

        Raises:
          ValueError: the tokenizer fails.
        """
        try:
            return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            _check_flag("skip_special_tokens", skip_special_tokens)
            raise ValueError(
                f"the tokenizer cannot decode its tokens: {of_foreign_code(error)}"
            ) from error


def _check_flag(name: str, value: Any) -> None:
    """Names what the library would not take; asked once it has failed, as it is called often."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shown(value)}")


def _token_id(inner: tokenizers.Tokenizer, name: str, token: str | None) -> int | None:
    if token is None:
        return None
    found = inner.token_to_id(token)
    if found is None and name != "pad_token":  # nothing is padded with it here
        raise ValueError(
            f"{name}={shown(token)} is not in the vocabulary: correct tokenizer_config.json"
        )
    return found


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        others = [name for name in OTHER_FORMATS if (folder / name).is_file()]
        found = f"{' and '.join(others)} cannot be read" if others else "the folder has none"
        raise FileNotFoundError(
            f"{path} is missing and {found}: save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    text = tokenizer_file.read(path)
    try:
        inner = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:  # `tokenizers` raises bare Exceptions, and panics
        of_foreign_code(error)
        raise ValueError(f"{path} is not a tokenizer ({error!s:.300}): fetch it again") from error
    pattern_trial.check(str(path), json.loads(text), inner)
    return inner


def _read_optional(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, {} where there is no file; raises as `read_json`."""
    return read_json(path) if path.is_file() else {}


def _content(tokens: dict[str, Any], name: str) -> str | None:
    """Returns a special token, which the file spells as a string or as an `AddedToken`."""
    token = tokens.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise ValueError(
            f"{name} must be a string or hold one as content, got {shown(token)}: correct it"
        )
    if token is not None:
        check_unicode(name, token)
    return token


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Returns the template of its own file, or the (default) one of the configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 ({error}): fetch it again") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"chat_template of tokenizer_config.json must be a string, or a list with one named "
            f"default, got {type(template).__name__}: correct it"
        )
    return template
