"""Random requests that use every feature of sampling, and a grammar without a tokenizer."""

from concurrent.futures import Future
import copy
from typing import Any

import numpy as np

from jaxrunner.api.sampling_params import RepetitionDetectionParams, SamplingParams
from jaxrunner.api.structured_outputs import StructuredOutputsParams

V = 61  # of `tiny`
EOS = 60
GRAMMAR = StructuredOutputsParams(regex="stands for `Parity`")


class Parity:
    """A grammar: even and odd ids take turns, and it may end after an even number of tokens."""

    def __init__(self):
        self.tokens: list[int] = []
        self.finished, self.error = False, None

    @property
    def is_accepting(self) -> bool:
        return len(self.tokens) % 2 == 0

    def allows(self, token: int) -> bool:
        if token == EOS:
            return self.is_accepting
        return token % 2 == len(self.tokens) % 2 and not self.finished

    def fill(self, row: np.ndarray) -> None:
        bits = [self.allows(t) for t in range(V)] + [True] * (-V % 32)
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def fill_drafts(self, rows: np.ndarray, drafts: list[int]) -> None:
        ahead, follows = copy.deepcopy(self), True
        ahead.fill(rows[0])
        for row, before, draft in zip(rows[1:], rows[:-1], drafts, strict=True):
            follows = follows and ahead.accept([draft])
            row[:] = before
            if follows:
                ahead.fill(row)

    def accept(self, token_ids) -> bool:
        for token in token_ids:
            if not self.allows(token):
                return False
            self.finished = token == EOS
            self.tokens += [] if self.finished else [token]
        return True


class ParityCompiler:
    """Stands for a `GrammarCompiler`; a grammar takes some calls of `done` to be ready."""

    def submit(self, params) -> Future:
        future: Future[Parity] = Future()
        future.set_result(Parity())
        return future

    def close(self) -> None:
        pass


def random_params(rng: np.random.Generator, **fixed: Any) -> SamplingParams:
    """Returns parameters in which each feature is on every few times."""

    def some(n: int) -> list[int]:
        return rng.choice(V - 1, rng.integers(1, n), replace=False).tolist()

    wanted: dict[str, Any] = dict(
        temperature=float(rng.choice([0.0, 0.7, 1.0, 1.6])),
        max_tokens=int(rng.integers(1, 14)),
        seed=int(rng.integers(2**40)),
    )
    options: dict[str, Any] = dict(
        top_k=int(rng.integers(1, 20)),
        top_p=float(rng.uniform(0.3, 1)),
        min_p=float(rng.uniform(0, 0.3)),
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-2, 2)),
        repetition_penalty=float(rng.uniform(0.5, 2)),
        logit_bias={t: float(rng.normal() * 5) for t in some(6)},
        allowed_token_ids=[*some(30), *range(40, 60)],
        bad_words=[some(3) for _ in range(3)],
        min_tokens=int(rng.integers(0, wanted["max_tokens"] + 1)),
        stop_token_ids=some(3),
        logprobs=int(rng.integers(0, 5)),
        prompt_logprobs=int(rng.integers(0, 5)),
        ignore_eos=True,
        structured_outputs=GRAMMAR,
        skip_reading_prefix_cache=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=3),
    )
    wanted |= {name: value for name, value in options.items() if rng.random() < 0.25}
    if rng.random() < 0.1:
        wanted |= dict(logprob_token_ids=some(5), logprobs=None)
    return SamplingParams(**wanted | fixed)
