"""The outputs of `LLM.generate`, in vLLM's names. Knows no JAX."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrunner.api import html
from jaxrunner.api.logprobs import FlatLogprobs, Logprob


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One completion of a prompt, whole or so far."""

    index: int  # which of the request's completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # sum over `token_ids`, in nats
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None  # one entry a token
    finish_reason: str | None = None  # "stop", "length", "abort", "error" or "repetition"
    stop_reason: int | str | None = None  # the stop id or string; None for EOS
    # Of each token, float32 [n]:
    raw_logprobs: np.ndarray | None = None  # under the model's own softmax
    processed_logprobs: np.ndarray | None = None  # under what it was sampled from, after all rules
    kept_mass: np.ndarray | None = None  # share that min-p, top-k, top-p left at its temperature
    # By head, its output in each step that gave tokens.
    heads: dict[str, list[np.ndarray]] | None = None
    # Of all tokens of prompt and output but the last, the experts of a mixture that computed them,
    # int16 [tokens, layers, k], -1 in layers without; with `enable_return_routed_experts`, told
    # when it has ended.
    routed_experts: np.ndarray | None = None

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def heat_map(self, decode: Callable[[list[int]], str] | None = None) -> html.HeatMap:
        """Returns the tokens coloured by logprob. `decode` spells those that have no text."""
        return html.draw(self, decode)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(_same(a, b) for a, b in pairs)

    def __repr__(self) -> str:
        shown = {
            "index": self.index,
            "text": _short(self.text),
            "token_ids": _short(self.token_ids),
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": _count(self.logprobs, "entries"),
            "finish_reason": repr(self.finish_reason) if self.finish_reason else None,
            "stop_reason": None if self.stop_reason is None else repr(self.stop_reason),
            "raw_logprobs": _count(self.raw_logprobs, "values"),
            "processed_logprobs": _count(self.processed_logprobs, "values"),
            "kept_mass": _count(self.kept_mass, "values"),
            "routed_experts": _count(self.routed_experts, "tokens"),
        }
        return _call("CompletionOutput", shown)


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, on `time.monotonic`'s clock, None is not yet; and what
    became of drafts."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    num_drafts: int = 0  # steps that verified drafts of its completions
    num_draft_tokens: int = 0  # the drafts of all these steps
    # And how many steps accepted the first draft, the first two, and so on.
    num_accepted_tokens_per_pos: tuple[int, ...] = ()

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a step that verified drafts, the model's own included; None without any."""
        accepted = sum(self.num_accepted_tokens_per_pos)
        return 1 + accepted / self.num_drafts if self.num_drafts else None


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """One request: its prompt, its completions, and whether they are whole."""

    request_id: str
    prompt: str | None  # None where the user gave token ids
    prompt_token_ids: list[int] | None  # None where the prompt could not be read
    # One entry a token, the first None.
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None  # why the request failed; it fails alone

    def _repr_html_(self) -> str:
        return html.request_html(self)

    def __repr__(self) -> str:
        shown = {
            "request_id": repr(self.request_id),
            "prompt": _short(self.prompt),
            "prompt_token_ids": _short(self.prompt_token_ids),
            "prompt_logprobs": _count(self.prompt_logprobs, "entries"),
            "outputs": _first(self.outputs, ", "),
            "finished": self.finished,
            "metrics": self.metrics,
            "num_cached_tokens": self.num_cached_tokens or None,
            "error": _short(self.error),
        }
        return _call("RequestOutput", shown)


class RequestOutputs(list[RequestOutput]):
    """The list that `LLM.generate` returns, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html.requests_html(self)

    def __repr__(self) -> str:
        return "RequestOutputs(" + _first(self, ",\n ") + ")"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while prompts were answered. `outputs` has all of them, in their order."""

    def __init__(self, outputs: RequestOutputs):
        self.outputs = outputs  # outputs cut short have finish_reason="abort"
        whole = [o for o in outputs if all(c.finish_reason != "abort" for c in o.outputs)]
        super().__init__(
            f"{len(whole)} of {len(outputs)} prompts were answered; the `outputs` of this "
            "exception, in a notebook sys.last_value.outputs, have the others so far"
        )


def _same(a: Any, b: Any) -> bool:
    """Returns whether two fields are equal. Of arrays `==` would return an array."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.array_equal(a, b, equal_nan=True)
    return a == b


def _call(name: str, shown: dict[str, Any]) -> str:
    """Returns the fields that are set, as keyword arguments of a call."""
    return f"{name}({', '.join(f'{k}={v}' for k, v in shown.items() if v is not None)})"


def _short(value: str | list[int] | None) -> str | None:
    """Returns the repr of a text or of ids, its middle left out where it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 200 else f"{value[:140]!r} ... {value[-40:]!r}"
    if value is None or len(value) <= 12:
        return None if value is None else repr(list(value))
    ends = [", ".join(map(str, part)) for part in (value[:8], value[-2:])]
    return f"[{ends[0]}, ... {ends[1]}] ({len(value)})"


def _count(values: Sequence[Any] | np.ndarray | None, name: str) -> str | None:
    return None if values is None else f"<{len(values)} {name}>"


def _first(outputs: Sequence[Any], separator: str) -> str:
    """Returns the repr of a list, but of its first three outputs alone."""
    inside = separator.join(map(repr, outputs[:3]))
    return f"[{inside}]" if len(outputs) <= 3 else f"[{inside}{separator}...] ({len(outputs)})"
