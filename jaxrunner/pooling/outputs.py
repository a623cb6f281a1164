"""The outputs of pooling models, in vLLM's names. Knows no JAX."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """The pooled array of a prompt: [X], or [tokens, X] of a model that returns each token's."""

    data: np.ndarray  # float32


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its dimensions."""
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """How likely each class is; scores of classes where `use_activation` is False."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Classes there are."""
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """How alike two texts are, or how well one answers the other."""

    score: float


@dataclass(frozen=True)
class PoolingRequestOutput:
    """One prompt, and what was made of it."""

    request_id: str
    outputs: Any  # a `PoolingOutput`, or the output of the class below
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finished: bool = True


@dataclass(frozen=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """One prompt, and its `EmbeddingOutput`."""


@dataclass(frozen=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """One prompt, and its `ClassificationOutput`."""


@dataclass(frozen=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """A pair of texts, and its `ScoringOutput`."""
