"""The parameters of requests: each class by itself, without an engine."""

from collections.abc import Iterator
import dataclasses
import random
from typing import Any

from jaxrunner.api.sampling_params import (
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
)
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.engine.beam import BeamSearchParams
from tests.attack import calls, kinds, models, values
from tests.attack.calls import Target
from tests.attack.harness import Case, Entry, Harm
from tests.attack.kinds import Kind, flag, instance, integer, one_of, real, several, text

COUNT = 2**30
ID = integer(0, COUNT)
IDS = several(ID, None)
SAMPLING: dict[str, Kind] = dict(
    n=integer(1, 16384),
    presence_penalty=real(-2, 2), frequency_penalty=real(-2, 2),
    repetition_penalty=real(0.001, 1000), temperature=real(0, 3e38), top_p=real(1e-37, 1),
    top_k=integer(-1, COUNT), min_p=real(0, 1), seed=integer(-1, 2**64 - 1, None),
    stop=Kind(lambda v: True if v is None else None if isinstance(v, str) else
              several(text()).good(v), ("", [""], ["a", 3], b"a", ["\ud800"], {"a": 1}, 3)),
    stop_token_ids=IDS, ignore_eos=flag(), max_tokens=integer(1, COUNT, None),
    min_tokens=integer(0, COUNT), logprobs=integer(-1, COUNT, None),
    prompt_logprobs=integer(-1, COUNT, None), logprob_token_ids=IDS, flat_logprobs=flag(),
    detokenize=flag(), skip_special_tokens=flag(), spaces_between_special_tokens=flag(),
    include_stop_str_in_output=flag(),
    output_kind=Kind(lambda v: v is None or type(v) is RequestOutputKind or
                     (None if type(v) is int else False), (3, -1, "DELTA", 1.0)),
    structured_outputs=instance(StructuredOutputsParams, None),
    logit_bias=Kind(lambda v: True if v is None else None if type(v) is dict else
                    False if isinstance(v, str | int | float) else None,
                    ({1: 2e4}, {-1: 1.0}, {"a": 1.0}, {1: None}, [(1, 2, 3)], {1: True})),
    allowed_token_ids=several(ID, None, least=1), bad_words=kinds.anything(),
    extra_args=Kind(lambda v: True if v is None else None,
                    ({1: 1.0}, {"a": "b"}, {"a": values.NAN}, [1], "ab")),
    truncate_prompt_tokens=Kind(lambda v: (type(v) is int and v != 0 and
                                integer(-1, COUNT).good(v)) or v is None, (0, -2, 1.0, "1", True)),
    skip_reading_prefix_cache=flag(None),
    repetition_detection=instance(RepetitionDetectionParams, None),
)  # fmt: skip
BEAM = dict(
    beam_width=integer(1, 1024), max_tokens=integer(1, COUNT), ignore_eos=flag(),
    temperature=one_of(0, 0.0), length_penalty=real(-100, 100), include_stop_str_in_output=flag(),
)  # fmt: skip
REPETITION = dict(
    max_pattern_size=integer(1, 4096), min_pattern_size=integer(1, 4096), min_count=integer(2, 4096)
)
ONE = text(None)
STRUCTURED = dict(
    json=Kind(lambda v: None if v is None or isinstance(v, str | dict) else False,
              ("[", "3", '{"a": NaN}', '{"a":' * 2000, {"a": {1}}, "\ud800", {(1,): 2})),
    regex=ONE, choice=several(text(), None, least=1), grammar=ONE, json_object=flag(None),
    structural_tag=kinds.anything(), disable_any_whitespace=flag(),
    disable_additional_properties=flag(), whitespace_pattern=ONE, disable_fallback=flag(),
)  # fmt: skip
GIVEN: dict[str, Any] = dict(
    json="{}", regex="a", choice=["a"], grammar='start: "a"', json_object=True
)


class _Made(Entry):
    """A class whose objects are made of bad fields."""

    targets: tuple[Target, ...]

    def case(self, rng: random.Random) -> Case:
        made = calls.case(rng, self.targets)
        # What contradicts another field may be told by the other's name.
        return made._replace(fields=(*made.fields, "no sampling parameter", "no structured output"))

    def canary(self) -> Iterator[Any]:
        return models.neighbour(models.calm())


def _set(**fields: Any) -> None:
    """Sets fields one by one, of which one that is refused changes nothing."""
    params = SamplingParams()
    for name, value in fields.items():
        before = repr(params)
        try:
            setattr(params, name, value)
        except Exception:
            if repr(params) != before:
                raise Harm(f"{before} became {params}") from None
            raise


class Sampling(_Made):
    """`SamplingParams`, made and changed."""

    targets = (
        Target("SamplingParams", SamplingParams, SAMPLING),
        Target("set", _set, SAMPLING, unknown=False),
    )


class Beam(_Made):
    """`BeamSearchParams`."""

    targets = (
        Target(
            "BeamSearchParams", BeamSearchParams, BEAM, lambda: dict(beam_width=2, max_tokens=2)
        ),
    )


class Repetition(_Made):
    """`RepetitionDetectionParams`."""

    targets = (
        Target(
            "RepetitionDetectionParams", RepetitionDetectionParams, REPETITION,
            lambda: dict(max_pattern_size=4096),
        ),
    )  # fmt: skip


class Structured(_Made):
    """`StructuredOutputsParams`: bad fields beside a good one, or by themselves."""

    def case(self, rng: random.Random) -> Case:
        name = rng.choice((*GIVEN, ""))
        needed = {name: GIVEN[name]} if name else {}
        target = Target(
            "StructuredOutputsParams", StructuredOutputsParams, STRUCTURED, lambda: needed
        )
        made = calls.case(rng, (target,))
        # With two kinds of constraint, or none, either is a reason.
        return made._replace(fields=(*made.fields, "needs exactly one of", "no structured output"))


assert set(SAMPLING) == {field.name for field in dataclasses.fields(SamplingParams)}
