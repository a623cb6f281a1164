"""Where a request ends: the host's decision, in one place. Knows no JAX."""

from collections.abc import Iterable

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.scheduling.request import Request


def append_tokens(request: Request, tokens: list[int]) -> list[int]:
    """Adds sampled tokens to a request, up to its end. Returns those that were added.

    EOS is the last token of a request with a grammar, ignored or not: the grammar says how it ends.
    """
    outputs, stops, max_len = request.output_token_ids, request.stop_ids, request.max_len
    pattern = request.params.repetition_detection
    last = () if request.grammar is None else request.eos_token_ids
    for count, token in enumerate(tokens, 1):
        outputs.append(token)
        request.num_tokens += 1
        # A cheap test first, which most tokens fail.
        could_end = token in stops or request.num_tokens >= max_len or pattern is not None
        if (could_end and check_stop(request)) or token in last:
            return tokens[:count]
    return tokens


def check_stop(request: Request) -> bool:
    """Whether the last token of a request ends it; sets `finish_reason` and `stop_reason` if so.

    `step.advance` ends a request on the device by the same rule, some steps before the host reads
    it: at the first of `stop_ids` with which it has `min_tokens` outputs (`min_len` there), or at
    `max_len` tokens. It gives no token behind that one, and later steps compute nothing. If a token
    does both, the reason is "stop". Only the host finds repetitions: the device goes on until the
    request is removed, and its tokens from then on are dropped.
    """
    outputs, params = request.output_token_ids, request.params
    token, pattern = outputs[-1], params.repetition_detection
    long_enough = len(outputs) >= params.min_tokens
    if token in request.stop_ids and long_enough:
        request.finish_reason = "stop"
        told = token in (params.stop_token_ids or ()) or token in request.eos_token_ids[1:]
        request.stop_reason = token if told else None
    elif pattern is not None and long_enough and pattern.found(outputs):
        request.finish_reason = "repetition"
    elif request.num_tokens >= request.max_len:
        request.finish_reason = "length"
    return request.finish_reason is not None


def stop_ids(params: SamplingParams, eos_token_ids: Iterable[int], *, most: int) -> frozenset[int]:
    """Returns the tokens that end a request.

    Raises:
      ValueError: they are more than `most`.
    """
    stops, eos = frozenset(params.stop_token_ids or ()), frozenset(eos_token_ids)
    if (num := len(stops | eos)) > most:
        raise ValueError(
            f"stop_token_ids and EOS are {num} ids, a request may have {most}: stop on fewer"
        )
    return stops if params.ignore_eos else stops | eos
