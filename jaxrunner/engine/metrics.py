"""Metrics of engines, under vLLM's names. Knows no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxrunner.scheduling.block_pool import BlockPool
from jaxrunner.scheduling.scheduler import Scheduler

LABELS = {"engine": "0"}


@dataclass
class Metric:
    """One figure of an engine."""

    name: str  # vLLM's, with its prefix
    labels: dict[str, str] = field(default_factory=LABELS.copy)


@dataclass
class Counter(Metric):
    """A sum that only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    """A value as it is now."""

    value: float = 0.0


def read_metrics(
    engines: Sequence[tuple[Scheduler, list[BlockPool], bool]], totals: Mapping[str, int]
) -> list[Metric]:
    """Returns all figures.

    engines: the scheduler and pools of each, and whether it is alive. totals: counts of ended
        completions on all engines, from `Completions`; they have the label of the first engine.
    """
    counters = dict(
        prompt_tokens=totals.get("prompt_tokens", 0),
        generation_tokens=totals.get("generation_tokens", 0),
        prefix_cache_queries=totals.get("prompt_tokens", 0),
        prefix_cache_hits=totals.get("cached_tokens", 0),
    )
    found = [metric for i, engine in enumerate(engines) for metric in _of_engine(str(i), *engine)]
    found += [Counter(f"vllm:{name}", value=value) for name, value in counters.items()]
    num_drafts, num_draft_tokens, *accepted = draft_counts(totals) or (0, 0)
    for name, value in dict(
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=sum(accepted),
    ).items():
        found.append(Counter(f"vllm:spec_decode_{name}", value=value))
    for i, count in enumerate(accepted):
        labels = LABELS | {"position": str(i)}
        found.append(Counter("vllm:spec_decode_num_accepted_tokens_per_pos", labels, count))
    reasons = sorted(name for name in totals if name.startswith("reason "))
    for name in reasons:
        labels = LABELS | {"finished_reason": name.removeprefix("reason ")}
        found.append(Counter("vllm:request_success", labels, totals[name]))
    return found


def _of_engine(
    name: str, scheduler: Scheduler, pools: list[BlockPool], is_alive: bool
) -> list[Metric]:
    labels = {"engine": name}
    used = max(1 - pool.num_free / pool.num_blocks for pool in pools)
    return [
        Gauge("vllm:num_requests_running", dict(labels), scheduler.num_running),
        Gauge("vllm:num_requests_waiting", dict(labels), scheduler.num_waiting),
        Gauge("vllm:kv_cache_usage_perc", dict(labels), used),
        Counter("vllm:num_preemptions", dict(labels), scheduler.num_preemptions),
        Gauge("jaxrunner:engine_alive", dict(labels), float(is_alive)),
    ]


def draft_counts(totals: Mapping[str, int]) -> tuple[int, ...]:
    """Returns steps that verified drafts, all these drafts, and steps that accepted each position.

    Returns () without drafts.
    """
    num = sum(name.startswith("drafts ") for name in totals)
    return tuple(totals[f"drafts {i}"] for i in range(num))
