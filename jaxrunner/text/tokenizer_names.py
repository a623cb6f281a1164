"""The methods of Hugging Face's tokenizers that users call, by their names there. Knows no JAX."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import tokenizers

from jaxrunner.api.validation import Bound, elements, shown, validate
from jaxrunner.text.chat import check_variables, conversations, render_chat

_FLAG = Bound(bool)
_ID = Bound(int, 0, 2**32 - 1)
_LENGTH = Bound(int, 1, 2**30, optional=True)
SIDES = ("right", "left")
# Arguments of transformers' `apply_chat_template` that are no variables of a template.
OF_TENSORS = {"padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs",
              "return_assistant_tokens_mask"}  # fmt: skip
ROLES = ("bos_token", "eos_token", "pad_token")


class BatchEncoding(dict[str, Any]):
    """The ids of a text, or of several, by name: `input_ids` and `attention_mask`."""

    @property
    def input_ids(self) -> Any:
        """Token ids."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """1 for each token, 0 for padding."""
        return self["attention_mask"]


class HuggingFaceNames(abc.ABC):
    """Methods of transformers' tokenizers, on top of a few of our own. No tensors, no truncation
    but at the end: what is not here is refused by name."""

    inner: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    eos_token_id: int | None
    pad_token_id: int | None
    chat_template: str | None
    special_ids: frozenset[int]
    added: dict[int, str]

    @abc.abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a text."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids."""

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool = False,
        max_length: int | None = None,
        padding_side: str = "right",
        return_attention_mask: bool = True,
        return_tensors: None = None,
    ) -> BatchEncoding:
        """Returns the ids of a text, or of each of a list.

        padding: True or "longest" fills up to the longest of a list, "max_length" to `max_length`,
            with EOS where there is no pad token. truncation: cuts what is over `max_length`.

        Raises:
          TypeError, ValueError: an argument is bad, or asks for tensors; names it.
        """
        flags = dict(add_special_tokens=add_special_tokens, truncation=truncation)
        _check_flags(**flags, return_attention_mask=return_attention_mask)
        max_length = validate("max_length", max_length, _LENGTH)
        validate("padding_side", padding_side, Bound(str, among=SIDES))
        padding = validate("padding", padding, Bound(bool, among=(*PADDINGS,)))
        if return_tensors is not None:
            raise ValueError(
                f"return_tensors={shown(return_tensors)} is not supported: lists of ids are "
                "returned, numpy.array makes an array of them"
            )
        if max_length is None and (truncation or padding == "max_length"):
            raise ValueError("max_length is missing, which padding or truncation needs: give it")
        one = isinstance(text, str)
        texts = [text] if one else list(elements("text", text, "a string"))
        rows = [self.encode(t, add_special_tokens=add_special_tokens) for t in texts]
        rows = [row[:max_length] for row in rows] if truncation else rows
        length = 0
        if PADDINGS[padding]:
            longest = max(map(len, rows), default=0)
            length = max_length if padding == "max_length" and max_length else longest
        filled = [self._fill(row, length, padding_side) for row in rows]
        every = dict(input_ids=[ids for ids, _ in filled])
        if return_attention_mask:
            every["attention_mask"] = [mask for _, mask in filled]
        return BatchEncoding({name: rows[0] if one else rows for name, rows in every.items()})

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns the ids of a conversation, or of several; its text without `tokenize`.

        `kwargs` are further variables of the template. Raises what `chat.render_chat` does.
        """
        flags = dict(add_generation_prompt=add_generation_prompt, tokenize=tokenize)
        flags |= dict(continue_final_message=continue_final_message, return_dict=return_dict)
        _check_flags(**flags)
        for name in OF_TENSORS & kwargs.keys():
            if kwargs.pop(name):
                raise ValueError(f"{name} is not supported here: call the tokenizer with the text")
        many = conversations(conversation)
        asked = check_variables(kwargs) | dict(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        texts = [
            self.render_chat(messages, asked, chat_template=chat_template) for messages in many
        ]
        text = texts[0] if many[0] is conversation else texts
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)  # the template has written them
        return encoded if return_dict else encoded.input_ids

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
        *,
        chat_template: str | None = None,
    ) -> str:
        """Returns the text of a conversation, by `chat_template` or that of the checkpoint.

        options: keyword arguments of `chat.render_chat`, which says what it raises.
        """
        template = self.chat_template if chat_template is None else chat_template
        tokens = dict(bos_token=self.bos_token, eos_token=self.eos_token)
        return render_chat(template, messages, **{**options, **tokens})

    def tokenize(self, text: str, *, add_special_tokens: bool = False) -> list[str]:
        """Returns the tokens of a text, as the vocabulary spells them."""
        return self.convert_ids_to_tokens(self.encode(text, add_special_tokens=add_special_tokens))

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Returns the text of each list of ids; like `decode` without special tokens."""
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str: ...

    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]: ...

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        """Returns the token of an id, or of each of a list, as the vocabulary spells it.

        Raises:
          TypeError, ValueError: there is no such id.
        """
        if isinstance(ids, int):
            return self._token("ids", ids)
        given = elements("ids", ids, _ID.wanted)
        return [self._token(f"ids[{i}]", token_id) for i, token_id in enumerate(given)]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Returns the id of a token as the vocabulary spells it, or of each; None where none is."""
        if isinstance(tokens, str):
            return self.inner.token_to_id(validate("tokens", tokens, Bound(str)))
        given = enumerate(elements("tokens", tokens, "a string"))
        return [self.inner.token_to_id(validate(f"tokens[{i}]", t, Bound(str))) for i, t in given]

    def get_vocab(self) -> dict[str, int]:
        """Returns the ids of all tokens, added ones included."""
        return self.inner.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Returns the ids of added tokens."""
        return {text: token_id for token_id, text in self.added.items()}

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """The special tokens that have a role, by its name."""
        named = {name: getattr(self, name) for name in ROLES}
        return {name: token for name, token in named.items() if token is not None}

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens, in their order."""
        named = [self.inner.token_to_id(token) for token in self.special_tokens_map.values()]
        return sorted({*self.special_ids, *(i for i in named if i is not None)})

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens, in the order of their ids."""
        return self.convert_ids_to_tokens(self.all_special_ids)

    def _token(self, name: str, token_id: Any) -> str:
        token = self.inner.id_to_token(validate(name, token_id, _ID))
        if token is None:
            raise ValueError(f"{name}={token_id} is no token's: ids end at {len(self.get_vocab())}")
        return token

    def _fill(self, row: list[int], length: int, side: str) -> tuple[list[int], list[int]]:
        """Returns ids and mask of a text, padded."""
        more = max(0, length - len(row))
        pad = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
        if more and pad is None:
            raise ValueError("padding needs a pad token, the tokenizer has none: leave it out")
        ids, mask = [pad or 0] * more, [0] * more
        if side == "left":
            return ids + row, mask + [1] * len(row)
        return row + ids, [1] * len(row) + mask


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        validate(name, value, _FLAG)


# Whether there is any.
PADDINGS: dict[Any, bool] = {False: False, True: True, "longest": True, "max_length": True,
                             "do_not_pad": False}  # fmt: skip
