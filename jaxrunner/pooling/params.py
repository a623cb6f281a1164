"""How prompts are pooled, in vLLM's names. Knows no JAX."""

from collections.abc import Mapping, Sequence
import copy
from dataclasses import dataclass, fields, replace
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.pooling.late_interaction import LateInteractionParams

TASKS = ("embed", "classify", "token_embed", "token_classify")
POOLING_TYPES = ("LAST", "MEAN", "CLS", "ALL", "STEP")
OF_TOKENS = ("ALL", "STEP")  # which of them tell an array of each token
_FLAG = Bound(bool, optional=True)
_DIMENSIONS = Bound(int, 1, 2**24, optional=True)
_TASK = Bound(str, optional=True)
BOUNDS: dict[str, Bound] = {
    "dimensions": _DIMENSIONS,
    "use_activation": _FLAG,
    "normalize": _FLAG,
    "truncate_prompt_tokens": Bound(int, -1, 2**30, optional=True),
    "skip_reading_prefix_cache": _FLAG,
    "task": _TASK,
    "step_tag_id": Bound(int, 0, 2**31 - 1, optional=True),
    "returned_token_ids": Bound(int, 0, 2**31 - 1, optional=True, each=True),
}


@dataclass(kw_only=True)
class PoolingParams:
    """The pooling parameters of one prompt. Checked when made.

    Raises:
      TypeError: a field has the wrong type.
      ValueError: a field is out of range, or two contradict each other.
    """

    dimensions: int | None = None  # first ones of an embedding that are kept (Matryoshka)
    use_activation: bool | None = None  # norm of embeddings, softmax or sigmoid of classes
    normalize: bool | None = None  # `use_activation` of embeddings, by its older name
    truncate_prompt_tokens: int | None = None  # its last ones are taken; -1 is as many as fit
    skip_reading_prefix_cache: bool | None = None
    task: str | None = None  # of `TASKS`, the one that the LLM was made for
    # Of pooling_type="STEP", where they are to differ from the `PoolerConfig`'s.
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    late_interaction_params: LateInteractionParams | None = None  # of `token_embed`

    def __post_init__(self):
        values = {name: validate(name, getattr(self, name), of) for name, of in BOUNDS.items()}
        vars(self).update(values)
        _check_task(self.task)
        late = self.late_interaction_params
        if late is not None and not isinstance(late, LateInteractionParams):
            raise TypeError(
                f"late_interaction_params must be LateInteractionParams, got {shown(late)}: make "
                "one"
            )
        if self.truncate_prompt_tokens == 0:
            raise ValueError(
                "truncate_prompt_tokens=0 would leave no prompt: take 1 or more, or -1"
            )
        _check_activation(self.normalize, self.use_activation)

    @property
    def activates(self) -> bool | None:
        """Whether the model's activation runs; None for its default."""
        return self.normalize if self.use_activation is None else self.use_activation

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field; where that is refused, nothing changes."""
        if len(vars(self)) < len(self.__dataclass_fields__):
            super().__setattr__(name, value)
        else:
            vars(self).update(vars(replace(self, **{name: value})))

    def __delattr__(self, name: str) -> None:
        """Refuses to take a field away."""
        raise AttributeError(f"{name} cannot be deleted: set it to its default")

    def clone(self) -> "PoolingParams":
        """Returns a copy, whose fields may be set."""
        return copy.copy(self)


@dataclass(kw_only=True)
class PooledRequest(SamplingParams):
    """The engine's request for a pooled prompt: one token, whose step returns the pooled array."""


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How an LLM pools, where that is to differ from what its checkpoint says.

    Raises:
      TypeError, ValueError: a field is not one of those there are.
    """

    task: str | None = None  # of `TASKS`
    pooling_type: str | None = None  # of `POOLING_TYPES`; "ALL" tells each token's array
    use_activation: bool | None = None  # where a request does not say
    normalize: bool | None = None  # `use_activation` of embeddings, by its older name
    dimensions: int | None = None
    step_tag_id: int | None = None  # of "STEP": the token whose scores alone are told, None for all
    # Of "STEP": which scores of a token; of a model that writes tokens, the ones that are scores.
    returned_token_ids: Sequence[int] | None = None

    def __post_init__(self):
        for name, bound in BOUNDS.items():
            if name in vars(self):
                object.__setattr__(self, name, validate(name, getattr(self, name), bound))
        _check_task(self.task)
        _check_activation(self.normalize, self.use_activation)
        validate("pooling_type", self.pooling_type, Bound(str, optional=True))
        if self.pooling_type is not None and self.pooling_type not in POOLING_TYPES:
            raise ValueError(
                f"pooling_type must be one of {POOLING_TYPES}, got {shown(self.pooling_type)}"
            )
        if self.task is not None and self.pooling_type is not None:
            own = dict(STEP=("token_classify",), ALL=("token_embed", "token_classify"))
            if self.task not in own.get(self.pooling_type, ("embed", "classify")):
                raise ValueError(
                    f"task={self.task!r} and pooling_type={self.pooling_type!r} contradict each "
                    "other: arrays of tokens go with 'ALL', scores of steps with 'STEP'"
                )

    @property
    def activates(self) -> bool | None:
        """Whether the model's activation runs where a request does not say; None for its own."""
        return self.normalize if self.use_activation is None else self.use_activation

    @classmethod
    def read(cls, asked: Any) -> "PoolerConfig":
        """Returns what a user passes: a `PoolerConfig`, a dict of its fields, or None.

        Raises:
          TypeError, ValueError: it is none of these, or a field is wrong; names it.
        """
        if isinstance(asked, cls):
            return asked
        if asked is not None and not isinstance(asked, Mapping):
            raise TypeError(f"pooler_config must be a PoolerConfig or a dict, got {shown(asked)}")
        known = [field.name for field in fields(cls)]
        if unknown := [key for key in asked or () if key not in known]:
            raise ValueError(
                f"pooler_config has {shown(unknown)}, it may have {', '.join(known)}: leave it out"
            )
        try:
            return cls(**asked or {})
        except (TypeError, ValueError) as error:
            raise type(error)(f"pooler_config: {error}") from error


def _check_activation(normalize: bool | None, use_activation: bool | None) -> None:
    if normalize is not None and use_activation not in (None, normalize):
        raise ValueError(
            f"normalize={normalize} and use_activation={use_activation} say the opposite of each "
            "other: give one"
        )


def _check_task(task: str | None) -> None:
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {shown(task)}")
