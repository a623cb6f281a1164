"""How a request is sampled and when it ends, in vLLM's names and defaults. Knows no JAX."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from jaxrunner.api.repetition import RepetitionDetectionParams
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.api.validation import Bound, check_unicode, elements, shown, validate

MAX_STOP_TOKEN_IDS = 128  # of a request; the device's table has room for EOS too
MAX_IDS = 1024  # of `allowed_token_ids`, of `logit_bias`, and of all `bad_words` together
MAX_BAD_WORDS = 128
MAX_LOGPROB_IDS = 128
NO_LIMIT = 2**62  # of tokens
MIN_TEMPERATURE = 0.01  # below it, quotients of logits leave float32's useful range


class RequestOutputKind(IntEnum):
    """The contents of each output of a stream."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # the new part
    FINAL_ONLY = 2  # all, once, at the end


@dataclass(kw_only=True)
class SamplingParams:
    """Checked and normalised when made: what is stored is what has an effect.

    Lists are stored as tuples of distinct values, mappings as tuples of pairs. A field may be set
    later, and is checked with the others as here; calls take copies, so that no request at work
    sees it.

    Raises:
      TypeError: a field has the wrong type or does not exist.
      ValueError: a field is out of range, or two fields contradict each other.
    """

    n: int = 1  # completions; the i-th has the seed `seed + i`
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0  # 0 takes the likeliest token, and turns the next three off
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 is off
    min_p: float = 0.0
    seed: int | None = None  # None or -1 lets the engine draw one
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None for as many as `max_model_len` leaves
    min_tokens: int = 0  # tokens before which no stop id is sampled and no stop string ends it
    logprobs: int | None = None  # likeliest tokens listed beside each sampled one; -1 is all
    prompt_logprobs: int | None = None  # the same of the prompt
    logprob_token_ids: Sequence[int] | None = None  # listed in place of the likeliest
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind | None = None  # None: the whole, or of a stream what is new
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None  # texts, or their token ids
    extra_args: Mapping[str, float] | None = None  # read by the model's `logits_fn`
    truncate_prompt_tokens: int | None = None  # its last ones are taken; -1 is as many as fit
    skip_reading_prefix_cache: bool | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    def __new__(cls, *args: Any, **kwargs: Any):
        """Names the parameters there are when one is not."""
        known = cls.__dataclass_fields__
        for name in kwargs.keys() - known.keys():
            raise TypeError(f"no sampling parameter is called {name!r}: use {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self):
        values = {name: getattr(self, name) for name in BOUNDS}
        values["stop"] = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        values = {name: validate(name, value, BOUNDS[name]) for name, value in values.items()}
        values["bad_words"] = _words(self.bad_words)
        vars(self).update(_normalised(values))
        _check_together(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field; where that is refused, nothing changes."""
        if len(vars(self)) < len(self.__dataclass_fields__):  # while it is made
            super().__setattr__(name, value)
        else:
            vars(self).update(vars(replace(self, **{name: value})))

    def __delattr__(self, name: str) -> None:
        """Refuses to take a field away."""
        raise AttributeError(f"{name} cannot be deleted: set it to its default")

    def clone(self) -> "SamplingParams":
        """Returns a copy, whose fields may be set."""
        same = object.__new__(type(self))
        vars(same).update(vars(self))
        return same

    def most_prompt_tokens(self, max_model_len: int) -> int:
        """Returns how many of a prompt's last tokens are read; -1 leaves room for one more."""
        most = self.truncate_prompt_tokens
        return NO_LIMIT if most is None else max_model_len - 1 if most == -1 else most

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def num_logprobs(self) -> int | None:
        """Columns of logprobs beside the sampled token's; -1 is all, None is no logprobs."""
        ids = self.logprob_token_ids
        return self.logprobs if ids is None else len(ids)

    def check(self, vocab_size: int, *, extra_args: Sequence[str] = ()) -> None:
        """Checks token ids and counts of tokens against the width of the logits.

        extra_args: the names that an engine's rules read.

        Raises:
          ValueError: one is beyond it, bad words are not encoded, or nothing reads an argument.
        """
        for word in self.bad_words or ():
            if isinstance(word, str):
                raise ValueError(f"bad_words has the text {word!r}, an engine takes token ids")
        for name, _ in self.extra_args or ():
            if name not in extra_args:
                raise ValueError(
                    f"extra_args has {name!r}, this engine's rules read {sorted(extra_args)}: "
                    "name it in the extra_args of a logits_fn"
                )
        for name, token_id in _token_ids(self):
            if token_id >= vocab_size:
                raise ValueError(
                    f"{name} has {token_id}, the model's ids end at {vocab_size - 1}: "
                    "take ids from the model's own tokenizer"
                )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValueError(
                    f"{name}={getattr(self, name)} exceeds the model's {vocab_size} tokens: "
                    "take -1 for all"
                )


# Two counts add up to no more than an int32 of the device's tables holds.
_COUNT = 2**30
_FLOAT = 3e38  # float32 holds it
_TINY = 1e-37  # float32 holds it as a normal number, which devices do not flush to 0
_TOKEN_ID = Bound(int, 0, _COUNT)
_PENALTY = Bound(float, -2, 2)
_FLAG = Bound(bool)
BOUNDS = {
    "n": Bound(int, 1, 16384),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Bound(float, 0.001, 1000),
    "temperature": Bound(float, 0, _FLOAT),
    "top_p": Bound(float, _TINY, 1),
    "top_k": Bound(int, -1, _COUNT),
    "min_p": Bound(float, 0, 1),
    "seed": Bound(int, -1, 2**64 - 1, optional=True),
    "stop": Bound(str, each=True),
    "stop_token_ids": Bound(int, 0, _COUNT, each=True, most=MAX_STOP_TOKEN_IDS),
    "ignore_eos": _FLAG,
    "max_tokens": Bound(int, 1, _COUNT, optional=True),
    "min_tokens": Bound(int, 0, _COUNT),
    "logprobs": Bound(int, -1, _COUNT, optional=True),
    "prompt_logprobs": Bound(int, -1, _COUNT, optional=True),
    "logprob_token_ids": Bound(int, 0, _COUNT, optional=True, each=True, most=MAX_LOGPROB_IDS),
    "flat_logprobs": _FLAG,
    "detokenize": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "output_kind": Bound(RequestOutputKind, optional=True),
    "structured_outputs": Bound(StructuredOutputsParams, optional=True),
    "logit_bias": Bound(float, -1e4, 1e4, optional=True, key=_TOKEN_ID, most=MAX_IDS),
    "allowed_token_ids": Bound(int, 0, _COUNT, optional=True, each=True, most=MAX_IDS),
    "extra_args": Bound(float, -_FLOAT, _FLOAT, optional=True, key=Bound(str), most=64),
    "truncate_prompt_tokens": Bound(int, -1, _COUNT, optional=True),
    "skip_reading_prefix_cache": Bound(bool, optional=True),
    "repetition_detection": Bound(RepetitionDetectionParams, optional=True),
}


def _words(words: Any) -> tuple[Any, ...]:
    """Returns bad words as a tuple of texts and of tuples of ids."""
    wanted = "a string or a list of token ids"
    found = {}
    for i, given in enumerate(() if words is None else elements("bad_words", words, wanted)):
        name = f"bad_words[{i}]"
        if isinstance(given, str):
            check_unicode(name, given)
        word = given if isinstance(given, str) else _word(name, given)
        if not word:
            raise ValueError(f"{name} is empty, which bans nothing: leave it out")
        found[word] = None
    tokens = sum(len(word) for word in found if not isinstance(word, str))
    if len(found) > MAX_BAD_WORDS or tokens > MAX_IDS:
        raise ValueError(
            f"bad_words has {len(found)} words and {tokens} tokens, a request may have "
            f"{MAX_BAD_WORDS} and {MAX_IDS}: give fewer"
        )
    return tuple(found)


def _word(name: str, ids: Any) -> tuple[int, ...]:
    """Returns the token ids of a word; unlike with other lists, order and repeats count."""
    if isinstance(ids, set | frozenset):
        raise TypeError(f"{name} must be a string or a list of token ids, got {shown(ids)}")
    ids = elements(name, ids, _TOKEN_ID.wanted)
    return tuple(validate(f"{name}[{i}]", token, _TOKEN_ID) for i, token in enumerate(ids))


def _token_ids(params: Any) -> Iterator[tuple[str, int]]:
    """Yields each token id of a request's parameters, with its field."""
    for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
        for token_id in getattr(params, name) or ():
            yield name, token_id
    for token_id, _ in params.logit_bias or ():
        yield "logit_bias", token_id
    for word in params.bad_words or ():
        for token_id in word if isinstance(word, tuple) else ():
            yield "bad_words", token_id


def _normalised(values: dict[str, Any]) -> dict[str, Any]:
    """Returns one spelling for what means the same."""
    if values["temperature"] == 0:
        values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values["temperature"] = values["temperature"] and max(values["temperature"], MIN_TEMPERATURE)
    values["top_k"] = max(values["top_k"], 0)
    values["seed"] = None if values["seed"] == -1 else values["seed"]
    return values


def _check_together(params: SamplingParams) -> None:
    """Checks what no field shows by itself, and what we do not do."""
    ids = params.logprob_token_ids
    for wrong, message in (
        (
            "" in (params.stop or ()),
            "stop has an empty string, which ends every text at once: leave it out",
        ),
        (
            params.stop and not params.detokenize,
            f"stop={params.stop!r} needs text, got detokenize=False: set it to True",
        ),
        (
            params.max_tokens is not None and params.min_tokens > params.max_tokens,
            f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}: "
            "lower it or raise max_tokens",
        ),
        (
            params.n > 1 and params.is_greedy,
            f"n={params.n} with temperature=0 gives one text n times: take n=1 or raise it",
        ),
        (
            params.allowed_token_ids == (),
            "allowed_token_ids is empty, which leaves no token: name some, or None for all",
        ),
        (
            ids is not None and params.logprobs not in (None, len(ids)),
            f"logprobs={params.logprobs} must be the number of logprob_token_ids, "
            f"{len(ids or ())}, or None",
        ),
        (
            params.truncate_prompt_tokens == 0,
            "truncate_prompt_tokens=0 leaves no prompt: give at least 1, -1 for as many as fit",
        ),
    ):
        if wrong:
            raise ValueError(message)
