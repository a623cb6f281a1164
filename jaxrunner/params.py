"""How a request is sampled and when it ends, in vLLM's names and defaults. Knows no JAX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
import reprlib
from typing import Any, NamedTuple

import numpy as np

MAX_STOP_TOKEN_IDS = 16  # of a request; the device's table has room for EOS too
MIN_TEMPERATURE = 0.01  # below it, quotients of logits leave float32's useful range


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Checked and normalised when made: what is stored is what has an effect.

    Raises:
      TypeError: a field has the wrong type or does not exist.
      ValueError: a field is out of range, or two fields contradict each other.
    """

    temperature: float = 1.0  # 0 takes the likeliest token, and turns the next three off
    top_k: int = 0  # 0 or -1 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None or -1 lets the engine draw one
    max_tokens: int | None = 16  # None is what `max_model_len` leaves
    min_tokens: int = 0  # tokens before which no stop id is sampled and no stop string ends it
    stop: str | Sequence[str] | None = None  # stored as a tuple
    stop_token_ids: Sequence[int] = ()  # stored as a tuple of distinct ids; None is none
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __new__(cls, *args: Any, **kwargs: Any):
        """Names the parameters there are when one is not."""
        known = [field.name for field in fields(cls)]
        for name in kwargs.keys() - set(known):
            raise TypeError(f"no sampling parameter is called {name!r}: use {', '.join(known)}")
        return super().__new__(cls)

    def __post_init__(self):
        stop = () if self.stop is None else self.stop
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        values: dict[str, Any] = {name: _read(self, name) for name in _BOUNDS}
        values["stop"] = (stop,) if isinstance(stop, str) else _elements("stop", stop, _STOP)
        values["stop_token_ids"] = _elements("stop_token_ids", ids, _TOKEN_ID)
        for name, value in _normalised(values).items():
            object.__setattr__(self, name, value)
        _check_together(self)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def check(self, vocab_size: int) -> None:
        """Checks token ids against the width of the logits.

        Raises:
          ValueError: one is beyond it.
        """
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise ValueError(
                    f"stop_token_ids has {token_id}, the model's ids end at {vocab_size - 1}: "
                    "take ids from the model's own tokenizer"
                )


class _Bound(NamedTuple):
    """What a field, or an element of one, may be: a type, and for numbers a closed range."""

    kind: type
    low: float = 0
    high: float = 0
    optional: bool = False

    @property
    def wanted(self) -> str:
        if self.kind in (bool, str):
            return {bool: "True or False", str: "a string"}[self.kind]
        kind = "an integer" if self.kind is int else "a finite number"
        return f"{kind} from {self.low} to {self.high}" + " or None" * self.optional


# Two counts add up to no more than an int32 of the device's tables holds.
_COUNT = 2**30
_FLOAT = 3e38  # float32 holds it
_TINY = 1e-37  # float32 holds it as a normal number, which devices do not flush to 0
_STOP = _Bound(str)
_TOKEN_ID = _Bound(int, 0, _COUNT)
_BOUNDS = {
    "temperature": _Bound(float, 0, _FLOAT),
    "top_k": _Bound(int, -1, _COUNT),
    "top_p": _Bound(float, _TINY, 1),
    "min_p": _Bound(float, 0, 1),
    "seed": _Bound(int, -1, 2**64 - 1, optional=True),
    "max_tokens": _Bound(int, 1, _COUNT, optional=True),
    "min_tokens": _Bound(int, 0, _COUNT),
    "ignore_eos": _Bound(bool),
    "include_stop_str_in_output": _Bound(bool),
    "detokenize": _Bound(bool),
    "skip_special_tokens": _Bound(bool),
}


def _read(params: SamplingParams, name: str) -> Any:
    """Returns a field as a plain Python value."""
    return _plain(name, getattr(params, name), _BOUNDS[name])


def _elements(name: str, values: Any, bound: _Bound) -> tuple[Any, ...]:
    """Returns a field that holds several values as a tuple without repeats."""
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise TypeError(
            f"{name} must be a list, each element {bound.wanted}, got {reprlib.repr(values)}"
        )
    return tuple(dict.fromkeys(_plain(f"{name}[{i}]", v, bound) for i, v in enumerate(values)))


def _plain(name: str, value: Any, bound: _Bound) -> Any:
    """Returns `value` as `bound.kind`, None where that is allowed."""
    if value is None and bound.optional:
        return None
    got: Any = value.item() if isinstance(value, np.generic) else value
    kinds = (int, float) if bound.kind is float else (bound.kind,)
    if type(got) not in kinds:
        raise TypeError(
            f"{name} must be {bound.wanted}, got {reprlib.repr(value)} of {type(value).__name__}"
        )
    # Said so that NaN fails it.
    if bound.kind in (int, float) and not bound.low <= got <= bound.high:
        raise ValueError(f"{name}={reprlib.repr(value)} is out of range: take {bound.wanted}")
    return bound.kind(got)


def _normalised(values: dict[str, Any]) -> dict[str, Any]:
    """Returns one spelling for what means the same."""
    if values["temperature"] == 0:
        values |= {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    values["temperature"] = values["temperature"] and max(values["temperature"], MIN_TEMPERATURE)
    values["top_k"] = max(values["top_k"], 0)
    values["seed"] = None if values["seed"] == -1 else values["seed"]
    return values


def _check_together(params: SamplingParams) -> None:
    """Checks what no field shows by itself."""
    if "" in (params.stop or ()):
        raise ValueError("stop has an empty string, which ends every text at once: leave it out")
    if params.stop and not params.detokenize:
        raise ValueError(f"stop={params.stop!r} needs text, got detokenize=False: set it to True")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens={params.min_tokens} exceeds max_tokens={params.max_tokens}: "
            "lower it or raise max_tokens"
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids has {len(params.stop_token_ids)} distinct ids, "
            f"a request may have {MAX_STOP_TOKEN_IDS}: stop on fewer"
        )
