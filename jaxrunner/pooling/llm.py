"""The methods of an `LLM` whose model pools, in vLLM's names."""

from collections.abc import Sequence
from dataclasses import replace
import functools
from typing import Any

import numpy as np

from jaxrunner.api.arguments import checked
from jaxrunner.api.outputs import RequestOutput
from jaxrunner.api.validation import shown
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.progress import Bar
from jaxrunner.engine.requested_prompts import one_each, read_adapters, read_requested
from jaxrunner.heads.late_interaction import QueryCache, max_sim, query_of
from jaxrunner.heads.pooled import POOLED, POSITIONS, PooledConfig
from jaxrunner.loading import llm_arguments
from jaxrunner.lora.lora_request import LoRARequest
from jaxrunner.pooling import late_interaction, steps
from jaxrunner.pooling.activations import ACTIVATIONS
from jaxrunner.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from jaxrunner.pooling.pairs import Texts, paired, read_pairs
from jaxrunner.pooling.params import PooledRequest, PoolingParams

Params = PoolingParams | Sequence[PoolingParams] | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class PoolingMethods:
    """The methods of an `LLM` with `runner="pooling"`. Bad prompts raise before any is computed."""

    completions: Completions
    engine: Any

    @functools.cached_property
    def queries(self) -> QueryCache:
        """Queries that `LateInteractionParams` keep from call to call."""
        return QueryCache()

    @checked(llm_arguments.POOLING, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def encode(
        self, prompts: Any, pooling_params: Params = None, *, use_tqdm: Bar = True,
        pooling_task: str | None = None, truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """Returns what is pooled of each prompt: [X], or [tokens, X] of tasks `token_...`.

        pooling_task: the one that the LLM was made for, or None.
        lora_request: an adapter for all prompts, or one or None for each.

        Raises:
          TypeError, ValueError: a prompt or a parameter is bad, or the LLM has another task.
        """
        config = _config(self.engine.model_config, "encode")
        if pooling_task is not None and pooling_task != config.task:
            raise ValueError(
                f"pooling_task={shown(pooling_task)} is not what this LLM was made for, which is "
                f"{config.task!r}: make one with pooler_config={{'task': ...}}"
            )
        return self._pool(
            prompts, pooling_params, use_tqdm, truncate_prompt_tokens, adapters=lora_request
        )

    @checked(llm_arguments.POOLING, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def embed(
        self, prompts: Any, *, use_tqdm: Bar = True, pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None, lora_request: Adapters = None,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Returns the embedding of each prompt; raises as `encode`."""
        _config(self.engine.model_config, "embed", "embed")
        found = self._pool(
            prompts, pooling_params, use_tqdm, truncate_prompt_tokens, adapters=lora_request
        )
        return [
            _as(EmbeddingRequestOutput, o, EmbeddingOutput(o.outputs.data.tolist())) for o in found
        ]

    @checked(llm_arguments.POOLING, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def classify(
        self, prompts: Any, *, use_tqdm: Bar = True, pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None, lora_request: Adapters = None,
    ) -> list[ClassificationRequestOutput]:  # fmt: skip
        """Returns how likely each class is of each prompt; raises as `encode`."""
        _config(self.engine.model_config, "classify", "classify")
        found = self._pool(
            prompts, pooling_params, use_tqdm, truncate_prompt_tokens, adapters=lora_request
        )
        return [
            _as(ClassificationRequestOutput, o, ClassificationOutput(o.outputs.data.tolist()))
            for o in found
        ]

    @checked(llm_arguments.POOLING, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def reward(
        self, prompts: Any, *, use_tqdm: Bar = True, pooling_params: Params = None,
        truncate_prompt_tokens: int | None = None, lora_request: Adapters = None,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """Returns the reward of each prompt, [X], or of each of its tokens, [tokens, X].

        They are the model's own scores where no parameters say otherwise. Raises as `encode`.
        """
        _config(self.engine.model_config, "reward", "classify", "token_classify")
        raw = PoolingParams(use_activation=False) if pooling_params is None else pooling_params
        return self._pool(prompts, raw, use_tqdm, truncate_prompt_tokens, adapters=lora_request)

    @checked(llm_arguments.POOLING, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def score(
        self, data_1: Texts, data_2: Texts, *, use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None, truncate_prompt_tokens: int | None = None,
        lora_request: Adapters = None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """Returns the score of each pair: of one text with each of several, or of two lists.

        A model with one class reads both texts of a pair; of embeddings it is the cosine, of those
        of tokens MaxSim (arXiv:2004.12832). Raises as `encode`.

        lora_request: an adapter for all pairs, or one or None for each.
        """
        config = _config(self.engine.model_config, "score", "classify", "embed", "token_embed")
        pairs = read_pairs(data_1, data_2)
        adapters = read_adapters(lora_request, len(pairs))
        if getattr(pooling_params, "late_interaction_params", None) is not None:
            raise ValueError(
                "late_interaction_params are of encode, and score compares pairs by itself: leave "
                "them out"
            )
        if config.task == "classify":
            if config.num_out != 1:
                raise ValueError(
                    f"score wants a model with one class, this one has {config.num_out}: call "
                    "classify"
                )
            tokenizer = self.completions.tokenizer
            both = [paired(tokenizer, *pair, as_pair=config.pairs) for pair in pairs]
            prompts, firsts = [prompt for prompt, _ in both], [first for _, first in both]
            found = self._pool(
                prompts, pooling_params, use_tqdm, truncate_prompt_tokens, firsts, adapters
            )
            return [_scored(one, float(one.outputs.data[0])) for one in found]
        if pooling_params is None:
            pooling_params = PoolingParams(use_activation=True)
        ids = [0 if adapter is None else adapter.lora_int_id for adapter in adapters]
        ends = [[(text, i) for text in pair] for pair, i in zip(pairs, ids, strict=True)]
        known = dict(zip(ids, adapters, strict=True))
        texts = list(dict.fromkeys(end for both in ends for end in both))  # each is read once
        outputs = self._pool(
            [text for text, _ in texts], pooling_params, use_tqdm, truncate_prompt_tokens,
            adapters=[known[i] for _, i in texts],
        )  # fmt: skip
        of = dict(zip(texts, outputs, strict=True))
        if config.task == "embed":
            products = [float(of[a].outputs.data @ of[b].outputs.data) for a, b in ends]
        else:
            queries = {a: query_of(of[a].outputs.data) for a in dict.fromkeys(a for a, _ in ends)}
            products = max_sim([queries[a] for a, _ in ends], [of[b].outputs.data for _, b in ends])
        return [_scored(of[b], score) for (_, b), score in zip(ends, products, strict=True)]

    def _pool(
        self,
        prompts: Any,
        params: Any,
        use_tqdm: Bar,
        truncate: int | None,
        firsts: Sequence[int | None] | None = None,
        adapters: Adapters = None,
    ) -> list[PoolingRequestOutput]:
        """Returns what is pooled of each prompt, activated as its parameters say.

        firsts: of prompts of two texts, the tokens that belong to the first.
        """
        config = _config(self.engine.model_config, "encode")
        is_one = isinstance(prompts, str) or not isinstance(prompts, Sequence)
        count = 1 if is_one else len(prompts)
        many = one_each("pooling_params", PoolingParams() if params is None else params, count)
        for one in many:
            _check(one, config)
        many = many[:count]  # none of no prompt
        if truncate is not None:
            many = [replace(one, truncate_prompt_tokens=truncate) for one in many]
        asked = [_sampling(one, config) for one in many]
        if firsts is not None:
            max_len = self.engine.config.max_model_len
            asked = [_of_pair(*x, max_len) for x in zip(asked, prompts, firsts, strict=True)]
        queued = read_requested(prompts, asked, None, adapters)
        late = [one.late_interaction_params for one in many]
        late_interaction.check(self.queries, late, config.task)
        try:
            outputs = self.completions.answer(queued, on_error="raise", use_tqdm=use_tqdm)
            told = [_told(*pair, config) for pair in zip(outputs, many, strict=True)]
        except BaseException:
            late_interaction.release(self.queries, late)
            raise
        arrays = late_interaction.compare(self.queries, [o.outputs.data for o in told], late)
        return [_as(type(o), o, PoolingOutput(x)) for o, x in zip(told, arrays, strict=True)]


def _config(config: Any, method: str, *tasks: str) -> PooledConfig:
    """Returns the config of a model that pools.

    Raises:
      ValueError: it is none, or has none of the tasks.
    """
    if not isinstance(config, PooledConfig):
        raise ValueError(
            f"LLM.{method} wants a model that pools, this one generates: pass runner='pooling'"
        )
    if tasks and config.task not in tasks:
        raise ValueError(
            f"LLM.{method} wants a model for {' or '.join(tasks)}, this one is for {config.task}: "
            "call encode, or pass pooler_config={'task': ...}"
        )
    return config


def _check(params: Any, config: PooledConfig) -> None:
    if not isinstance(params, PoolingParams):
        raise TypeError(f"pooling_params must be PoolingParams, got {shown(params)}: make one")
    if params.task not in (None, config.task):
        raise ValueError(
            f"PoolingParams.task={params.task!r} is not what this LLM was made for, which is "
            f"{config.task!r}: leave it out"
        )
    config.check_dimensions(params.dimensions)
    sizes = dict(num_out=config.num_out, vocab_size=config.vocab_size)
    steps.check(params, steps=config.steps, **sizes)


def _of_pair(request: PooledRequest, prompt: Any, first: int | None, max_len: int) -> PooledRequest:
    """Returns a request which says how many tokens that are read are of the first text."""
    if first is None:
        return request
    num_cut = max(0, len(prompt["prompt_token_ids"]) - request.most_prompt_tokens(max_len))
    return replace(request, extra_args=dict(first_segment_len=float(max(0, first - num_cut))))


def _sampling(params: PoolingParams, config: PooledConfig) -> PooledRequest:
    """Returns the engine's request: one token, whose step returns the pooled array."""
    skip = params.skip_reading_prefix_cache
    return PooledRequest(
        max_tokens=1, temperature=0.0, detokenize=False,
        truncate_prompt_tokens=params.truncate_prompt_tokens,
        # Poolings over all tokens need all of them computed.
        skip_reading_prefix_cache=True if config.pooling != "LAST" else skip,
    )  # fmt: skip


def _told(
    output: RequestOutput, params: PoolingParams, config: PooledConfig
) -> PoolingRequestOutput:
    heads, ids = output.outputs[0].heads, output.prompt_token_ids
    if output.error is not None or heads is None or ids is None:
        raise ValueError(f"prompt {output.request_id} cannot be pooled: {output.error}")
    if config.pooling == "ALL":
        values, positions = (np.concatenate(heads[name]) for name in (POOLED, POSITIONS))
        data = np.empty((len(ids), values.shape[1]), np.float32)
        data[positions] = values
        data = steps.select(data, ids, params, config) if config.steps else data
    else:
        data = heads[POOLED][-1]
    if config.task.endswith("embed"):
        data = data[..., : params.dimensions or config.dimensions]
    activates = config.use_activation if params.activates is None else params.activates
    data = ACTIVATIONS[config.activation](data) if activates else data
    return PoolingRequestOutput(
        output.request_id, PoolingOutput(data), list(ids), output.num_cached_tokens
    )


def _as(kind: type, output: PoolingRequestOutput, outputs: Any) -> Any:
    return kind(**vars(output) | dict(outputs=outputs))


def _scored(output: PoolingRequestOutput, score: float) -> ScoringRequestOutput:
    return _as(ScoringRequestOutput, output, ScoringOutput(score))
