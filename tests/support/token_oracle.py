"""The tokens of a request, worked out without engine, cache and neighbours."""

from collections.abc import Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import LLM
from jaxrunner.api.outputs import CompletionOutput
from jaxrunner.api.structured_outputs import StructuredOutputsParams
from jaxrunner.models.llama import llama
from jaxrunner.ops.backends import dense
from jaxrunner.sampling.seed import TARGET, noise
from jaxrunner.text.grammar_compiler import GrammarCompiler
from jaxrunner.types import Inputs
from tests.support import rules

V, L, N = 4096, 64, 18  # ids; positions; tokens of an output at most
PROMPT = "for i in range(10):\n    x[i] = 0\n    x[i] = 0\n    x[i] ="


class Oracle:
    """What is known without an engine."""

    def __init__(self, llm: LLM):
        tokenizer, self._eos = llm.get_tokenizer(), sorted(llm.completions.eos_token_ids)
        self.decode, self.prompt = tokenizer.decode, tuple(tokenizer.encode(PROMPT))
        self._config, self._weights = llm.engine.model_config, llm.engine.runner.params
        self._grammars = GrammarCompiler(tokenizer, vocab_size=V, eos_token_ids=self._eos)
        self._forward, self._of_ids = jax.jit(self._dense), functools.cache(self._logits)
        self._of_seed = functools.cache(self._noise)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Returns what `ids` are drawn from, [len(ids), V]."""
        return self._of_ids((*self.prompt, *ids))[len(self.prompt) - 1 : -1]

    def draws(self, params: Any, told: CompletionOutput) -> bool:
        """Whether each token is the likeliest one, after all rules and with its noise."""
        ids, start, stops = told.token_ids, len(self.prompt), [*params.stop_token_ids, *self._eos]
        out = 0.0 + rules.processed(
            np.pad(self.logits(ids), ((0, N - len(ids)), (0, 0))), [params] * N, vocab_size=V,
            prompts=[self.prompt] * N, outputs=[ids[:j] for j in range(N)], stop_ids=stops,
            position=start + np.arange(N), min_len=start + params.min_tokens,
            mask=params.structured_outputs and self._masks(params.structured_outputs, ids),
        )  # fmt: skip
        out += 0 if params.is_greedy else self._of_seed(params.seed + told.index)
        scores = out[: len(ids)]
        return bool(ids) and bool((scores[range(len(ids)), ids] >= scores.max(-1) - 1e-3).all())

    def _masks(self, wanted: StructuredOutputsParams, ids: Sequence[int]) -> np.ndarray:
        grammar = self._grammars.submit(wanted).result()
        for mask, token in zip(masks := np.full((N, V // 32), -1, np.int32), ids, strict=False):
            grammar.fill(mask)
            grammar.accept([token])
        return masks

    def _noise(self, seed: int) -> np.ndarray:
        draw = functools.partial(noise, stream=TARGET, shape=(V,))
        words, positions = jnp.asarray([0, seed], jnp.uint32), len(self.prompt) + jnp.arange(N)
        return np.asarray(jax.vmap(draw, (None, 0))(words, positions))

    def _logits(self, ids: tuple[int, ...]) -> np.ndarray:
        padded = jnp.asarray(ids + (0,) * (L - len(ids)), jnp.int32)
        return np.asarray(self._forward(self._weights, padded))[: len(ids)]

    def _dense(self, weights, ids):
        ops = dense(1)
        inputs, none = Inputs(ids, jnp.arange(L), jnp.full(L, L)), (None,) * 8
        hidden, _ = llama.forward(self._config, weights, none, inputs, ops)
        return llama.logits(self._config, weights, hidden)
