"""All entries, by the names that the command takes."""

from collections.abc import Callable

from tests.attack import (
    adapters,
    engines,
    files,
    lifecycle,
    llm_keywords,
    llm_methods,
    params,
    pooling,
    runners,
    snapshots,
    workers,
)
from tests.attack.harness import Entry

ENTRIES: dict[str, Callable[[], Entry]] = {
    "sampling": params.Sampling,
    "beam": params.Beam,
    "repetition": params.Repetition,
    "structured": params.Structured,
    "llm": llm_keywords.Keywords,
    "generate": llm_methods.Generate,
    "stream": llm_methods.Stream,
    "chat": llm_methods.Chat,
    "beam_search": llm_methods.BeamSearch,
    "scores": llm_methods.Scores,
    "small": llm_methods.Small,
    "pooling": pooling.Pooling,
    "adapters": adapters.Adapters,
    "weights": lifecycle.Weights,
    "settings": lifecycle.Settings,
    "engine_add": engines.Add,
    "engine_told": engines.Told,
    "runner": runners.Runner,
    "worker": workers.Keywords,
    "worker_steps": workers.Steps,
    "snapshots": snapshots.Snapshots,
    "weight_folders": snapshots.Weights,
    "checkpoints": files.Checkpoints,
    "tokenizers": files.Tokenizers,
}
