"""Reads the arguments of a call: prompts with parameters, priority, adapter. Knows no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrunner.api.sampling_params import RequestOutputKind, SamplingParams
from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.lora.lora_request import LoRARequest, check_lora_request
from jaxrunner.text.prompts import ParsedPrompt, parse_prompts

# The dict has further arguments of `Engine.add`: priority and lora_request.
RequestedPrompt = tuple[ParsedPrompt, SamplingParams, dict[str, Any]]
PRIORITY = Bound(int, -(2**62), 2**62)
# Keys of generation_config.json, by our names.
OVERRIDES = {
    name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
} | dict(max_new_tokens="max_tokens")


def read_requested(
    prompts: Any,
    sampling_params: SamplingParams | Sequence[SamplingParams],
    priority: Any,
    lora_request: Any = None,
    *,
    whole: bool = False,
    max_logprobs: int | None = None,
) -> list[RequestedPrompt]:
    """Returns each prompt with its arguments. Parameters are copies.

    whole: whether each prompt has one output, at its end. max_logprobs: the most that a request may
        ask for, -1 or None for no limit.

    Raises:
      TypeError, ValueError: the prompts as a whole, or what stands beside them, is bad.
    """
    parsed = parse_prompts(prompts)
    params = one_each("sampling_params", sampling_params, len(parsed))
    for param in params:
        if not isinstance(param, SamplingParams):
            raise TypeError(
                f"sampling_params must be a SamplingParams, got {type(param).__name__}: "
                "pass SamplingParams(...), or a list of them"
            )
        if whole and param.output_kind == RequestOutputKind.DELTA:
            raise ValueError(
                "output_kind=DELTA is for LLM.stream, and generate returns the whole: leave it out"
            )
        if max_logprobs not in (None, -1):
            _check_logprobs(param, max_logprobs)
    ranks = one_each("priority", 0 if priority is None else priority, len(parsed))
    priorities = [validate(f"priority[{i}]", rank, PRIORITY) for i, rank in enumerate(ranks)]
    adapters = read_adapters(lora_request, len(parsed))
    rest = [
        dict(priority=rank, lora_request=adapter)
        for rank, adapter in zip(priorities, adapters, strict=False)  # none of no prompt
    ]
    # Copies: who made them may set fields before a stream is read.
    return [(p, one.clone(), more) for p, one, more in zip(parsed, params, rest, strict=False)]


def overridden(params: SamplingParams, overrides: Mapping[str, Any] | None) -> SamplingParams:
    """Returns default parameters with keys of a generation_config.json in place of theirs.

    Raises:
      TypeError, ValueError: a key that is not read, or a bad value; names it.
    """
    fields = {}
    for key, value in (overrides or {}).items():
        if key not in OVERRIDES:
            raise ValueError(
                f"override_generation_config has {shown(key)}, it may have {', '.join(OVERRIDES)}: "
                "set others in SamplingParams"
            )
        fields[OVERRIDES[key]] = value
    try:
        return replace(params, **fields)
    except (TypeError, ValueError) as error:
        raise type(error)(f"override_generation_config: {error}") from error


def read_adapters(lora_request: Any, count: int) -> list[LoRARequest | None]:
    """Returns the adapter of each of `count` prompts, from one for all or one for each.

    Raises:
      TypeError, ValueError: it is no adapter, or not one for each prompt.
    """
    adapters = map(check_lora_request, one_each("lora_request", lora_request, count))
    return list(adapters)[:count]


def one_each(name: str, value: Any, count: int) -> list[Any]:
    """Returns a value for each of `count` prompts, from one for all or a list of them.

    Raises:
      ValueError: the list has another length.
    """
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        return [value] * max(1, count)  # looked at even where there is no prompt
    given = list(value)  # whose length is what it says
    if len(given) != count:
        raise ValueError(
            f"{name} must be one, or one for each of {count} prompts, got {len(given)}"
        )
    return given


def _check_logprobs(params: SamplingParams, most: int) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and not 0 <= wanted <= most:
            raise ValueError(
                f"{name}={wanted} exceeds max_logprobs={most} of this LLM: ask for fewer"
            )
