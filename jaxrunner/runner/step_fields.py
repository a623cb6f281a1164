"""The checks of a scheduler's output, each field by itself. See `step_check`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.program.bucket import MAX_STOP_IDS
from jaxrunner.program.program import Program
from jaxrunner.scheduling.request import NEVER, NewRequest, Request, SchedulerOutput

_ID = Bound(str)
_INT32 = 2**31 - 1


def check_fields(output: SchedulerOutput) -> None:
    """Checks what each field of a step holds.

    Raises:
      TypeError, ValueError: one is of the wrong type or out of range; names it.
    """
    if not isinstance(output, SchedulerOutput):
        raise TypeError(f"scheduler_output must be a SchedulerOutput, got {shown(output)}")
    kinds: dict[str, Any] = dict(
        scheduled_new_reqs=list,
        new_block_ids=dict,
        num_scheduled_tokens=dict,
        finished_req_ids=(set, frozenset),
        preempted_req_ids=(set, frozenset),
        requests=dict,
    )
    for name, kind in kinds.items():
        value: Any = getattr(output, name)
        if not isinstance(value, kind):
            wanted = getattr(kind, "__name__", "set")
            raise TypeError(f"{name} must be a {wanted}, got {shown(value)}")
        for each in value if kind is not list else ():
            validate(f"an id of {name}", each, _ID)
    validate("num_steps", output.num_steps, Bound(int, 1, _INT32))
    for i, new in enumerate(output.scheduled_new_reqs):
        if not isinstance(new, NewRequest):
            raise TypeError(f"scheduled_new_reqs[{i}] must be a NewRequest, got {shown(new)}")
        validate(f"scheduled_new_reqs[{i}].request_id", new.request_id, _ID)
    _check_values(output)


def check_new(where: str, new: NewRequest, program: Program) -> None:
    """Checks what a new request says of itself, but for its blocks.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range; names it.
    """
    check_ints(f"{where}.token_ids", new.token_ids, 0, program.config.vocab_size - 1)
    length, longest = len(new.token_ids), program.engine.max_model_len
    if not 0 < length < longest:
        raise ValueError(
            f"{where}.token_ids has {length} tokens, max_model_len={longest} takes 1 to "
            f"{longest - 1}"
        )
    if not isinstance(new.params, SamplingParams):
        raise TypeError(f"{where}.params must be a SamplingParams, got {shown(new.params)}")
    try:
        new.params.check(program.config.vocab_size, extra_args=program.extra_args)
    except ValueError as error:
        raise ValueError(f"{where}.params: {error}") from error
    if not isinstance(new.cache_salt, bytes):
        raise TypeError(f"{where}.cache_salt must be bytes, got {shown(new.cache_salt)}")
    for name in ("stop_ids", "eos_token_ids"):
        ids: Any = getattr(new, name)
        if not isinstance(ids, set | frozenset | list | tuple):
            raise TypeError(f"{where}.{name} must be a set of tokens, got {shown(ids)}")
    bounds = dict(
        prompt_len=Bound(int, 1, length),
        seed=Bound(int, 0, 2**64 - 1),
        max_len=Bound(int, length + 1, longest),
        stop_ids=Bound(int, 0, _INT32, each=True, most=MAX_STOP_IDS),
        eos_token_ids=Bound(int, 0, _INT32, each=True, most=MAX_STOP_IDS),
        num_computed=Bound(int, 0, length - 1),
        prompt_logprobs_start=Bound(int, 0, NEVER),
        lora_id=Bound(int, 0, _INT32 if program.engine.enable_lora else 0),
        lora_place=Bound(int, 0, _INT32),
        data_rank=Bound(int, 0, program.num_ranks - 1),
    )
    for name, bound in bounds.items():
        validate(f"{where}.{name}", getattr(new, name), bound)
    if (num := len({*new.stop_ids, *new.eos_token_ids})) > MAX_STOP_IDS:
        raise ValueError(
            f"{where}.stop_ids and eos_token_ids are {num} ids, a request may have {MAX_STOP_IDS}"
        )


def check_ints(name: str, values: Any, low: int, high: int) -> None:
    """Checks a list of integers.

    Raises:
      TypeError, ValueError: it is none, or has one out of range; names its place.
    """
    flat = isinstance(values, np.ndarray) and values.ndim == 1
    if not flat and type(values) not in (list, tuple, range):
        raise TypeError(f"{name} must be a list of integers, got {shown(values)}")
    if set(map(type, values)) <= {int} and all(low <= value <= high for value in values):
        return  # at once: prompts are long
    for i, value in enumerate(values):
        validate(f"{name}[{i}]", value, Bound(int, low, high))


def _check_values(output: SchedulerOutput) -> None:
    counts: Mapping[str, Any] = output.num_scheduled_tokens
    for request_id, count in counts.items():
        validate(f"num_scheduled_tokens[{shown(request_id)}]", count, Bound(int, 1, _INT32))
    for request_id, request in output.requests.items():
        if not isinstance(request, Request):
            raise TypeError(f"requests[{shown(request_id)}] must be a Request")
    if both := output.preempted_req_ids & counts.keys():
        raise ValueError(f"preempted_req_ids has {shown(sorted(both))}, which are scheduled too")
