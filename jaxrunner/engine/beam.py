"""Beam search: the likeliest continuations that keeping a few best ones at each length finds.

Every step is a request of one token for each beam. What beams have in common is in the prefix
cache, whole blocks shared and the last one copied, so that a beam computes one token a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.output_processor import RequestState
from jaxrunner.engine.progress import Bar, progress_bar
from jaxrunner.lora.lora_request import LoRARequest
from jaxrunner.scheduling.request import Request
from jaxrunner.text.prompts import ParsedPrompt
from jaxrunner.text.tokenizer import Tokenizer

_BOUNDS = {
    "beam_width": Bound(int, 1, 1024),
    "max_tokens": Bound(int, 1, 2**30),
    "ignore_eos": Bound(bool),
    "temperature": Bound(float, 0, 1e30),
    "length_penalty": Bound(float, -100, 100),
    "include_stop_str_in_output": Bound(bool),
}


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search, in vLLM's names.

    Raises:
      TypeError, ValueError: a field is of the wrong type or out of range; names it.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0  # scores are divided by length ** this; over 0 favours length
    include_stop_str_in_output: bool = False  # whether sequences keep their EOS

    def __post_init__(self) -> None:
        for name, bound in _BOUNDS.items():
            validate(name, getattr(self, name), bound)
        if self.temperature != 0:
            raise ValueError(
                f"temperature={self.temperature} has no effect on a beam search, which samples "
                "nothing: leave it out"
            )


@dataclass
class BeamSearchSequence:
    """A continuation."""

    tokens: list[int]  # prompt and output
    cum_logprob: float = 0.0  # of the output, EOS included
    score: float = 0.0  # `cum_logprob` by length, what beams are ranked by
    text: str | None = None  # of `tokens`
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | None = None  # the EOS id


@dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of a prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    """The search of one prompt."""

    prompt_len: int
    cache_salt: str | None
    lora_request: LoRARequest | None
    live: list[BeamSearchSequence]
    done: list[BeamSearchSequence] = field(default_factory=list)


def search(
    completions: Completions,
    prompts: Sequence[ParsedPrompt],
    params: BeamSearchParams,
    *,
    lora_requests: Sequence[LoRARequest | None],
    use_tqdm: Bar = False,
) -> list[BeamSearchOutput]:
    """Searches for each prompt, all at once, as transformers does with early_stopping=False.

    lora_requests: the adapter of each prompt.

    Raises:
      TypeError, ValueError: a prompt is bad or leaves no room for `max_tokens`.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params must be a BeamSearchParams, got {shown(params)}")
    engine, tokenizer = completions.engine, completions.tokenizer
    eos = frozenset() if params.ignore_eos else completions.eos_token_ids
    columns = min(2 * params.beam_width, engine.model_config.vocab_size)
    one = SamplingParams(max_tokens=1, temperature=0, logprobs=columns, detokenize=False)
    starts = [(prompt.resolve(tokenizer)[1], prompt.cache_salt) for prompt in prompts]
    for i, (ids, _) in enumerate(starts):
        if len(ids) + params.max_tokens > engine.config.max_model_len:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens, max_tokens={params.max_tokens} more exceed "
                f"max_model_len={engine.config.max_model_len}: lower max_tokens"
            )
    searches = [
        _Search(len(ids), salt, lora_request, [BeamSearchSequence(list(ids))])
        for (ids, salt), lora_request in zip(starts, lora_requests, strict=True)
    ]
    for _ in progress_bar(use_tqdm, iterable=range(params.max_tokens), desc="Beam search"):
        beams = [
            (
                ParsedPrompt(token_ids=beam.tokens, cache_salt=search.cache_salt),
                search.lora_request,
            )
            for search in searches
            for beam in search.live
        ]
        if not beams:
            break
        found = iter(_next_tokens(completions, beams, one))
        for search in searches:
            _advance(search, [next(found) for _ in search.live], params, eos)
    return [_result(search, params, tokenizer) for search in searches]


def _next_tokens(
    completions: Completions,
    beams: list[tuple[ParsedPrompt, LoRARequest | None]],
    one: SamplingParams,
) -> list[Request]:
    states: list[RequestState] = []
    try:
        for beam, lora_request in beams:
            completions.add(beam, one, into=states, lora_request=lora_request)
        completions.run(states)
    finally:
        completions.drop(states)
    for state in states:
        if state.error is not None:
            raise ValueError(f"a beam failed: {state.error}")
    return [state.request for state in states if state.request is not None]


def _advance(
    search: _Search, requests: Sequence[Request], params: BeamSearchParams, eos: frozenset[int]
) -> None:
    """Replaces the live beams by their best continuations."""
    if not requests:
        return
    W = params.beam_width
    candidates = []
    for beam, request in zip(search.live, requests, strict=True):
        part = request.logprobs[0]
        # Works in any logprobs mode: the sampled token's raw logprob gives the normalisation.
        logprobs = part.top_value[0] + (part.raw[0] - part.value[0])
        for token, logprob in zip(part.top_ids[0].tolist(), logprobs.tolist(), strict=True):
            candidates.append((beam.cum_logprob + logprob, beam, token))
    candidates.sort(key=lambda c: -c[0])
    search.live = []
    for rank, (total, beam, token) in enumerate(candidates[: 2 * W]):
        tokens = [*beam.tokens, token]
        length = len(tokens) - search.prompt_len
        sequence = BeamSearchSequence(tokens, total, total / length**params.length_penalty)
        if token not in eos:
            search.live.append(sequence)
        elif rank < W:
            sequence.finish_reason, sequence.stop_reason = "stop", token
            search.done.append(sequence)
        if len(search.live) == W:
            break
    search.done = sorted(search.done, key=lambda s: -s.score)[:W]
    if search.live:
        best = search.live[0]
        if len(search.done) == W and search.done[-1].score >= best.score:
            search.live = []  # as good as they can get


def _result(
    search: _Search, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    for sequence in search.live:
        sequence.finish_reason = "length"
    found = sorted(search.done + search.live, key=lambda s: -s.score)[: params.beam_width]
    for sequence in found:
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            sequence.tokens = sequence.tokens[:-1]
        if tokenizer is not None:
            sequence.text = tokenizer.decode(sequence.tokens)
    return BeamSearchOutput(found)
