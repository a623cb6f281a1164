"""The logprobs of a completion and its prompt, as its user reads them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrunner.api.logprobs import FlatLogprobs, Logprob
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.scheduling.request import Request
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.types import Logprobs

LogprobDict = dict[int, Logprob]
ARRAYS = ("value", "raw", "processed", "kept_mass")


class CompletionLogprobs:
    """Collects logprobs of sampled tokens, and names those of a prompt's tokens.

    tokenizer: gives the texts of tokens; None for logprobs without texts.
    """

    def __init__(self, params: SamplingParams):
        self._params = params
        self._entries: Any = FlatLogprobs() if params.flat_logprobs else []
        self._arrays: dict[str, list[float]] = {name: [] for name in ARRAYS}
        self._num_parts = 0  # of `request.logprobs`, added so far
        self.tokenizer: Tokenizer | None = None

    def add(self, request: Request, token_ids: Sequence[int]) -> None:
        """Adds the logprobs of a request's new tokens, if it asked for some."""
        if (wanted := self._params.num_logprobs) is None:
            return
        ranked, at = self._params.logprob_token_ids is None, 0
        for part in request.logprobs[self._num_parts :]:
            tokens = token_ids[at : (at := at + part.value.size)]
            self._entries += self._named(part, tokens, wanted, ranked=ranked)
            for name in ARRAYS:
                self._arrays[name] += getattr(part, name).tolist()
        self._num_parts = len(request.logprobs)

    def fields(self, start: int, stop: int) -> Mapping[str, Any]:
        """Returns the fields of a `CompletionOutput` for its tokens from `start` to `stop`.

        `cumulative_logprob` is of all tokens up to `stop`. Returns {} where no logprobs are wanted.
        """
        if self._params.num_logprobs is None:
            return {}
        arrays = {name: np.array(self._arrays[name][start:stop], np.float32) for name in ARRAYS[1:]}
        return dict(
            cumulative_logprob=sum(self._arrays["value"][:stop]),
            logprobs=self._entries[start:stop],
            raw_logprobs=arrays["raw"],
            processed_logprobs=arrays["processed"],
            kept_mass=arrays["kept_mass"],
        )

    def of_prompt(
        self, request: Request, token_ids: Sequence[int], wanted: int
    ) -> list[LogprobDict | None] | FlatLogprobs:
        """Returns an entry for each token of the prompt, None for those without logprobs.

        Raises:
          ValueError: the tokenizer cannot decode a token.
        """
        entries: list[LogprobDict | None] = [None] * len(token_ids)
        for positions, part in request.prompt_logprobs:
            ids = [token_ids[p] for p in positions.tolist()]
            named = self._named(part, ids, wanted, ranked=True)
            for position, entry in zip(positions.tolist(), named, strict=True):
                entries[position] = entry
        if not self._params.flat_logprobs:
            return entries
        flat = FlatLogprobs()
        flat.extend(entries)
        return flat

    def _named(
        self, part: Logprobs, token_ids: Sequence[int], wanted: int, *, ranked: bool
    ) -> Iterator[LogprobDict]:
        """Yields the logprobs of each token: its own first, then the `wanted` others."""
        count = part.top_ids.shape[1] if wanted == -1 else wanted
        rows: Any = jax.tree.map(np.ndarray.tolist, part)
        for i, token_id in enumerate(token_ids):
            entry = {token_id: Logprob(rows.value[i], rows.rank[i], self._text(token_id))}
            others = zip(rows.top_ids[i][:count], rows.top_value[i], strict=False)
            for rank, (other, value) in enumerate(others, 1):
                if other != token_id:
                    text = self._text(other)
                    entry[other] = Logprob(value, rank if ranked else None, text)
            yield entry

    def _text(self, token_id: int) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.token_text(token_id)
