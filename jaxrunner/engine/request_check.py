"""Checks the arguments of `Engine`'s methods, before anything changes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import Bound, elements, shown, validate
from jaxrunner.mixtures.given_routes import check_given
from jaxrunner.pooling.params import PooledRequest
from jaxrunner.program.bucket import MAX_STOP_IDS
from jaxrunner.program.program import Program
from jaxrunner.scheduling.request import FINISH_REASONS, NEVER, Request
from jaxrunner.scheduling.stop import stop_ids
from jaxrunner.slot_table import cache_salt as salt_of_tables
from jaxrunner.text.prompts import check_prompt

_ID = Bound(str)
_TEXT = Bound(str, optional=True)
_EOS = Bound(int, 0, 2**31 - 1)
_PRIORITY = Bound(int, -(2**62), 2**62)
_POSITION = Bound(int, 0, NEVER, optional=True)


def new_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    of: Program,
    eos_token_ids: Iterable[int] = (),
    priority: int = 0,
    prompt_logprobs_start: int | None = None,
    prefix_from: Request | None = None,
    cache_salt: str | None = None,
    routed_experts: Any = None,
    lora_id: int = 0,
) -> Request:
    """Returns a new request, with the seed of its parameters, or 0 for one to be drawn.

    cache_salt: it shares cached blocks only with requests of the same salt. lora_id: its adapter.
    routed_experts: see `given_routes.check_given`; the request then shares no cached blocks.

    Raises:
      TypeError, ValueError: an argument is of the wrong type or out of range; names it.
    """
    vocab_size, max_len = of.config.vocab_size, of.engine.max_model_len
    params = _params(params, of).clone()  # its user may set fields of the other
    most = params.most_prompt_tokens(max_len)
    prompt = check_prompt(prompt_token_ids, vocab_size, max_len, most=most)
    params.check(vocab_size, extra_args=of.extra_args)
    _check_by_rules(params, of)
    start = _first_scored(params, prompt_logprobs_start)
    eos = _read_eos(eos_token_ids)
    salts = of.config.cache_salt(len(prompt)), salt_of_tables(of.model.tables, params)
    request = Request(
        request_id=validate("request_id", request_id, _ID),
        prompt_token_ids=prompt,
        params=params,
        seed=params.seed or 0,
        max_len=min(len(prompt) + (params.max_tokens or max_len), max_len),
        stop_ids=stop_ids(params, eos, most=MAX_STOP_IDS),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        priority=validate("priority", priority, _PRIORITY),
        cache_salt=_salt(*salts, lora_id, validate("cache_salt", cache_salt, _TEXT)),
        lora_id=lora_id,
        cache_limit=0 if params.skip_reading_prefix_cache else start - 1,
        prefix_from=prefix_from,
        prompt_logprobs_start=start,
    )
    return request if routed_experts is None else _replaying(request, routed_experts, of)


def _first_scored(params: SamplingParams, asked: int | None) -> int:
    """Returns the position of the first prompt token whose logprob is wanted."""
    start = validate("prompt_logprobs_start", asked, _POSITION)
    return NEVER if params.prompt_logprobs is None else max(1, 1 if start is None else start)


def _replaying(request: Request, routed_experts: Any, of: Program) -> Request:
    """Returns a request whose prompt given experts compute, and which shares no keys."""
    given = check_given(routed_experts, len(request.prompt_token_ids), of.config)
    salt = _salt(request.cache_salt, "with given routes")
    return replace(request, given_routes=given, cache_salt=salt, cache_limit=0)


def _params(params: SamplingParams, of: Program) -> SamplingParams:
    """Returns parameters of the kind that a model takes."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params must be a SamplingParams, got {shown(params)}: make one")
    if not of.model.samples and not isinstance(params, PooledRequest):
        raise ValueError(
            f"{of.config.architecture} pools and generates no tokens: call embed, encode, "
            "classify, score or reward, or pass runner='generate' where the model can"
        )
    return params


def check_among(request: Request, live: Mapping[str, Request]) -> None:
    """Checks a new request against the unfinished ones: its id, and whose prefix it shares.

    Raises:
      TypeError, ValueError: the id is in use, or `prefix_from` is none of them with its prompt.
    """
    if request.request_id in live:
        name = f"request {shown(request.request_id)}"
        raise ValueError(f"{name} is unfinished: give each live request its own request_id")
    first: Any = request.prefix_from
    if first is None:
        return
    if not isinstance(first, Request):
        raise TypeError(f"prefix_from must be what `add` returned, or None, got {shown(first)}")
    if live.get(first.request_id) is not first:
        raise ValueError(
            f"prefix_from={shown(first.request_id)} is not at work in this engine: leave it out"
        )
    if first.prompt_token_ids != request.prompt_token_ids:
        raise ValueError(
            f"prefix_from={shown(first.request_id)} has another prompt than request "
            f"{shown(request.request_id)}: leave it out"
        )


def check_ids(request_ids: Iterable[str]) -> list[str]:
    """Returns a list of ids of requests.

    Raises:
      TypeError, ValueError: it is none, or has what is no id.
    """
    given = enumerate(elements("request_ids", request_ids, _ID.wanted))
    return [validate(f"request_ids[{i}]", request_id, _ID) for i, request_id in given]


def check_reason(reason: str, stop_reason: int | str | None) -> None:
    """Checks why a request is said to end.

    Raises:
      TypeError, ValueError: it is no reason.
    """
    if validate("reason", reason, _ID) not in FINISH_REASONS:
        raise ValueError(f"reason must be one of {FINISH_REASONS}, got {shown(reason)}")
    if stop_reason is not None and type(stop_reason) not in (int, str):
        raise TypeError(f"stop_reason must be a token id, a text or None, got {shown(stop_reason)}")


def _read_eos(eos_token_ids: Iterable[int]) -> list[int]:
    """Returns ids that end a request."""
    # A tokenizer may have more ids than the model: those beyond it are never sampled.
    given = elements("eos_token_ids", eos_token_ids, _EOS.wanted)
    return [validate(f"eos_token_ids[{i}]", token, _EOS) for i, token in enumerate(given)]


def _check_by_rules(params: SamplingParams, of: Program) -> None:
    """Lets rules of the user's own refuse numbers: in a step that would end other requests too."""
    for rule in of.rules:
        if rule.extra_args:
            rule.row(params, params.seed or 0)


def _salt(*parts: Any) -> bytes:
    """Returns what keys depend on besides tokens, b"" for nothing; other parts, another salt."""
    return repr(parts).encode() if any(parts) else b""
