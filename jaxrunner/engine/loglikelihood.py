"""Scores given tokens: logprobs of prompts, as arrays, from a start position on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import Bound, elements, shown, validate
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.output_processor import RequestState
from jaxrunner.engine.progress import Bar
from jaxrunner.scheduling.request import NEVER
from jaxrunner.text.prompts import ParsedPrompt, parse_prompts

SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)


class TokenScores(NamedTuple):
    """Scores of the tokens of a prompt from some position on, each given all tokens before it."""

    token_ids: np.ndarray  # [n]
    logprobs: np.ndarray  # [n], float32, under the model's own softmax
    ranks: np.ndarray  # [n], 1 is the likeliest
    is_likeliest: np.ndarray  # [n], whether greedy decoding gives the token


class Loglikelihood(NamedTuple):
    """Scores of continuations, each after its context."""

    logprob: np.ndarray  # [pairs], float64, of the whole continuation
    is_greedy: np.ndarray  # [pairs], whether greedy decoding gives the whole continuation
    tokens: list[TokenScores]


def score(
    completions: Completions,
    prompts: Sequence[ParsedPrompt],
    starts: Sequence[int],
    *,
    routed_experts: Sequence[Any] | None = None,
    use_tqdm: Bar = False,
) -> list[TokenScores]:
    """Scores the tokens of each prompt from its start on; earlier ones may come from the cache.

    The head runs on the scored tokens only, 256 at a time.
    routed_experts: for each prompt the experts that compute it, as `check_given` takes them.

    Raises:
      TypeError, ValueError: a prompt is bad, or its logits are NaN.
    """
    starts = [validate("start", start, Bound(int, 0, NEVER)) for start in starts]
    given: list[Any] = [None] * len(prompts)
    if routed_experts is not None:
        given = list(elements("routed_experts", routed_experts, "an array of a prompt"))
    if len(given) != len(prompts):
        raise ValueError(
            f"routed_experts must be an array for each of {len(prompts)} prompts, got {len(given)}"
        )
    states: list[RequestState] = []
    try:
        for prompt, start, routes in zip(prompts, starts, given, strict=True):
            asked = dict(prompt_logprobs_start=start, routed_experts=routes)
            completions.add(prompt, SCORED, into=states, **asked)
        completions.run(states, use_tqdm=use_tqdm)
    finally:
        completions.drop(states)
    for i, state in enumerate(states):
        if state.error is not None:
            raise ValueError(f"prompt {i} cannot be scored: {state.error}")
    return [_scores(state, start) for state, start in zip(states, starts, strict=True)]


def _scores(state: Any, start: int) -> TokenScores:
    start = max(1, start)
    tokens = np.array(state.prompt_token_ids[start:], np.int64)
    out = TokenScores(
        tokens, np.zeros(tokens.size, np.float32), np.zeros(tokens.size, np.int64), tokens < 0
    )
    # A prompt that was preempted is scored again: the same positions, the same values.
    for positions, part in state.request.prompt_logprobs:
        at = positions - start
        out.logprobs[at], out.ranks[at] = part.raw, part.rank
        out.is_likeliest[at] = part.top_ids[:, 0] == tokens[at]
    return out


def loglikelihood(
    completions: Completions, pairs: Sequence[tuple[Any, Any]], *, use_tqdm: Bar = False
) -> Loglikelihood:
    """Scores each continuation after its context.

    Raises:
      TypeError, ValueError: a pair is bad; says which.
    """
    given = elements("pairs", pairs, "a pair (context, continuation)")
    split = [_split(completions, i, pair) for i, pair in enumerate(given)]
    prompts = [ParsedPrompt(token_ids=context + rest) for context, rest in split]
    starts = [len(context) for context, _ in split]
    tokens = score(completions, prompts, starts, use_tqdm=use_tqdm)
    return Loglikelihood(
        np.array([t.logprobs.sum(dtype=np.float64) for t in tokens], np.float64),
        np.array([bool(t.is_likeliest.all()) for t in tokens], np.bool_),
        tokens,
    )


def _split(completions: Completions, i: int, pair: Any) -> tuple[list[int], list[int]]:
    """Returns the token ids of a context and of its continuation."""
    if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
        raise TypeError(f"pair {i} must be (context, continuation), got {shown(pair)}")
    tokenizer = completions.tokenizer
    if all(isinstance(part, str) for part in pair) and tokenizer is not None:
        context, rest = pair
        spaces = len(context) - len(context.rstrip())
        context, rest = context[: len(context) - spaces], context[len(context) - spaces :] + rest
        first, whole = tokenizer.encode(context), tokenizer.encode(context + rest)
        # If a token spans both, the continuation is encoded by itself.
        parts = first, whole[len(first) :] or tokenizer.encode(rest, add_special_tokens=False)
    else:
        parsed = parse_prompts([{"prompt_token_ids": part} for part in pair])
        if error := parsed[0].error or parsed[1].error:
            raise type(error)(f"pair {i}: {error}")
        parts = parsed[0].token_ids or [], parsed[1].token_ids or []
    context_ids, rest_ids = (list(part) for part in parts)
    if not context_ids:
        start = None if tokenizer is None else tokenizer.bos_token_id
        start = tokenizer.eos_token_id if tokenizer and start is None else start
        if start is None:
            raise ValueError(f"pair {i} has an empty context and the model no BOS: give a token")
        context_ids = [start]
    if not rest_ids:
        raise ValueError(f"pair {i} has an empty continuation: give at least one token")
    return context_ids, rest_ids
