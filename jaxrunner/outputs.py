"""What `LLM.generate` returns, in vLLM's names. Knows no JAX."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, repr=False)
class CompletionOutput:
    """One completion of a prompt, whole or so far."""

    index: int  # which of the request's completions
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # sum over `token_ids`, in nats
    logprobs: list[Any] | None = None  # one entry a token
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the stop id or string; None for EOS

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        shown = {
            "index": self.index,
            "text": _short(self.text),
            "token_ids": _short(self.token_ids),
            "cumulative_logprob": self.cumulative_logprob,
            "logprobs": None if self.logprobs is None else f"<{len(self.logprobs)} entries>",
            "finish_reason": repr(self.finish_reason) if self.finish_reason else None,
            "stop_reason": None if self.stop_reason is None else repr(self.stop_reason),
        }
        return _call("CompletionOutput", shown)


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, on `time.monotonic`'s clock; None is not yet."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """One request: its prompt, its completions, and whether they are whole."""

    request_id: str
    prompt: str | None  # None where the user gave token ids
    prompt_token_ids: list[int] | None  # None where the prompt could not be read
    prompt_logprobs: list[Any] | None  # one entry a token, the first None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    error: str | None = None  # why the request failed; it fails alone

    def __repr__(self) -> str:
        logprobs = self.prompt_logprobs
        shown = {
            "request_id": repr(self.request_id),
            "prompt": None if self.prompt is None else _short(self.prompt),
            "prompt_token_ids": _short(self.prompt_token_ids),
            "prompt_logprobs": None if logprobs is None else f"<{len(logprobs)} entries>",
            "outputs": self.outputs,
            "finished": self.finished,
            "metrics": self.metrics,
            "num_cached_tokens": self.num_cached_tokens or None,
            "error": None if self.error is None else repr(self.error),
        }
        return _call("RequestOutput", shown)


def _call(name: str, shown: dict[str, Any]) -> str:
    """Returns the fields that say something, as a call would spell them."""
    return f"{name}({', '.join(f'{k}={v}' for k, v in shown.items() if v is not None)})"


def _short(value: str | list[int] | None) -> str | None:
    """Returns the repr of a text or of ids, its middle left out where it is long."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 200 else f"{value[:140]!r} ... {value[-40:]!r}"
    if value is None or len(value) <= 12:
        return None if value is None else repr(list(value))
    ends = [", ".join(map(str, part)) for part in (value[:8], value[-2:])]
    return f"[{ends[0]}, ... {ends[1]}] ({len(value)})"
