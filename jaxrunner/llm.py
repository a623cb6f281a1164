"""The Python API: prompts in, text out.

with LLM("path/to/checkpoint") as llm:
    print(llm.generate(["def fib(n):"], SamplingParams(temperature=0.7))[0].outputs[0].text)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
import functools
from pathlib import Path
from typing import Any

from jaxrunner.api.arguments import checked
from jaxrunner.api.outputs import RequestOutput, RequestOutputs
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.elastic.scale import scale
from jaxrunner.engine import beam
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.llm_names import LLMNames
from jaxrunner.engine.loglikelihood import Loglikelihood, TokenScores, loglikelihood, score
from jaxrunner.engine.metrics import draft_counts
from jaxrunner.engine.progress import Bar
from jaxrunner.engine.replicas import Replicas, engines_of, make_engine
from jaxrunner.engine.requested_prompts import overridden, read_adapters, read_requested
from jaxrunner.loading import llm_arguments
from jaxrunner.loading.loader import Loaded
from jaxrunner.lora.lora_request import LoRARequest
from jaxrunner.pooling.llm import PoolingMethods
from jaxrunner.rule import Rule
from jaxrunner.runner.phases import phase
from jaxrunner.text.chat import check_variables, conversations
from jaxrunner.text.grammar_compiler import GrammarCompiler
from jaxrunner.text.prompts import parse_prompts
from jaxrunner.text.tokenizer import Tokenizer
from jaxrunner.worker.report import describe_runner
from jaxrunner.worker.workers import make_worker

Adapters = LoRARequest | Sequence[LoRARequest | None] | None
WARM_UPS = {True: {}, "all": dict(all_rules=True), "background": dict(background=True)}


class LLM(PoolingMethods, LLMNames):
    """A model that answers prompts, many at once.

    model: a folder with config.json, safetensors and tokenizer.json, or a name on the Hugging
        Face hub, whose safetensors, json and txt files are fetched.
    tokenizer: a folder or a `Tokenizer` in place of the model's; `skip_tokenizer_init` for none.
    download_dir, hf_token: of what comes from the hub, as `huggingface_hub` knows them.
    dtype: of weights and activations, "auto" for the checkpoint's, float32 on a CPU.
    load_format: "auto" reads weights, "dummy" makes random ones on the device, "sharded_state"
        reads what `save_sharded_state` wrote, from files named as `model_loader_extra_config` may
        say: {"pattern": ...}.
    hf_overrides: keys of config.json to replace; None removes one.
    quantization: "fp8" or "int8" rounds weights that are floats to 8 bits while they are read.
    runner, pooler_config: "pooling" returns arrays in place of tokens, see docs/pooling_models.md.
    generation_config: "auto" takes default sampling parameters from the checkpoint's file of that
        name, "vllm" ignores them; `override_generation_config` replaces keys of it.
    max_logprobs: the most logprobs that a request may ask for; None or -1 for no limit.
    tensor_parallel_size: devices that each have a shard of the model: of a mixture whole experts
        with `enable_expert_parallel`, else some units of every expert.
    decode_context_parallel_size: how many of these devices share out the tokens of one KV head,
        `cp_kv_cache_interleave_size` at a time, in place of a copy on each.
    data_parallel_size: engines with `tensor_parallel_size` devices each, which share the requests;
        with `enable_expert_parallel` ranks of one engine, whose devices share out the experts.
    pipeline_parallel_size: stages, with some of the layers and `tensor_parallel_size` devices each.
    check_nan: searches the weights for NaN and infinity.
    logits_fn: `fn(logits [V], row) -> logits [V]`, compiled into the sampling of every request, or
        a `Rule`; see `jaxrunner.sampling.custom`, which also has a slow variant for any Python.
    speculative_config: how tokens are drafted, as `api.speculative_config.SpeculativeConfig` says:
        {"method": "eagle3", "model": DIR, "num_speculative_tokens": 3}. Tokens stay the same.
    cache_dir: a folder where compiled programs are kept, None for none; see `program_cache`.
    warm_up: True compiles the programs of usual requests now, "all" also those of logprobs,
        penalties and grammars, which otherwise compile when first needed; "background" waits for
        the largest program only. False compiles each program when first needed.
    Other keywords are those of `sizing.plan_engine`; `memory_plan` shows the memory they take.
    vLLM's other keywords are accepted if they ask for built-in behaviour; see `llm_arguments`.

    Raises:
      FileNotFoundError, ValueError, TypeError, MemoryError: a bad checkpoint or setting; names it.
    """

    @checked(llm_arguments.LLM, **llm_arguments.OF_VLLM)
    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        download_dir: str | Path | None = None,
        hf_token: str | bool | None = None,
        dtype: str = "auto",
        seed: int = 0,
        load_format: str = "auto",
        model_loader_extra_config: dict[str, Any] | None = None,
        hf_overrides: dict[str, Any] | None = None,
        generation_config: str = "auto",
        override_generation_config: dict[str, Any] | None = None,
        max_logprobs: int | None = None,
        chat_template: str | None = None,
        check_nan: bool = False,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = 1,
        logits_fn: Callable[..., Any] | Rule | None = None,
        speculative_config: dict[str, Any] | None = None,
        warm_up: bool | str = True,
        cache_dir: str | Path | None = "auto",
        use_tqdm: bool = True,
        **sizes: Any,
    ):
        worker = make_worker(
            model, revision=revision, dtype=dtype, seed=seed, load_format=load_format, **sizes,
            model_loader_extra_config=model_loader_extra_config, hf_overrides=hf_overrides,
            check_nan=check_nan, download_dir=download_dir, hf_token=hf_token, cache_dir=cache_dir,
            tensor_parallel_size=tensor_parallel_size, data_parallel_size=data_parallel_size,
            logits_fn=logits_fn, speculative_config=speculative_config,
        )  # fmt: skip
        loaded = worker.read_checkpoint(
            tokenizer=None if skip_tokenizer_init else model if tokenizer is None else tokenizer,
            tokenizer_revision=tokenizer_revision, generation_config=generation_config,
        )  # fmt: skip
        self.tokenizer = loaded.tokenizer
        self._chat_template, self._max_logprobs = chat_template, max_logprobs
        self._defaults = overridden(loaded.default_params, override_generation_config)
        with ExitStack() as undo:  # a start that fails frees what it took
            undo.callback(worker.shutdown)
            worker.start(warm_up=WARM_UPS[warm_up] if warm_up else None, progress=use_tqdm)
            self.memory_plan = worker.memory_plan
            self.engine = make_engine(worker, make_compiler=_compiler_maker(loaded))
            self.completions = Completions(self.engine, self.tokenizer, loaded.eos_token_ids)
            undo.pop_all()

    def report(self) -> str:
        """Returns what runs on which device, and why, one line each, and the memory it takes."""
        engine, drafts = self.engine, draft_counts(self.completions.totals)
        replicas = engine.report() if isinstance(engine, Replicas) else ""
        balances = "".join(e.balance.describe() for e in engines_of(engine))
        steps = engine.config.num_decode_steps
        lines = describe_runner(engine.runner, steps, drafts, replicas, balances)
        return f"{lines}memory:\n{self.memory_plan}"

    def __repr__(self) -> str:
        model, config = self.engine.model_config, self.engine.config
        return (
            f"LLM({str(self.load_config.model)!r}: {model.architecture} in {config.dtype}, "
            f"{config.max_num_seqs} requests of up to {config.max_model_len:,} tokens, "
            f"{self.memory_plan.num_tokens:,} in the KV cache)"
        )

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @phase("output")
    @checked(llm_arguments.GENERATE, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
        on_error: str = "return",
    ) -> RequestOutputs:
        """Answers prompts; outputs have their order. The largest `max_tokens` start first.

        Of many prompts the first begin before the last are queued.

        prompts: a str, {"prompt": str}, {"prompt_token_ids": [int]}, or a list of them.
        sampling_params: one for all prompts, or one for each; the model's defaults where None.
        lora_request: an adapter for all prompts, or one or None for each.
        on_error: "return" gives a bad prompt an output with finish_reason="error" and its
            message, and answers the others; "raise" raises before any is answered.

        Raises:
          Interrupted: by Ctrl-C; a `KeyboardInterrupt` whose `outputs` are the answers so far.
        """
        requested = read_requested(
            prompts, self._or_defaults(sampling_params), priority, lora_request, whole=True,
            max_logprobs=self._max_logprobs,
        )  # fmt: skip
        return self.completions.answer(requested, on_error=on_error, use_tqdm=use_tqdm)

    @checked(llm_arguments.ON_ERROR, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora_request: Adapters = None,
        on_error: str = "return",
    ) -> Iterator[RequestOutput]:
        """Answers prompts like `generate`, and yields outputs as their tokens arrive.

        An output has one completion, as `output_kind` says: its new tokens (the default) or all of
        its tokens so far; or, once, all finished completions of the prompt. The last output of a
        prompt has `finished` set. Prompts are queued when the first output is asked for.
        """
        params, most = self._or_defaults(sampling_params), self._max_logprobs
        requested = read_requested(prompts, params, priority, lora_request, max_logprobs=most)
        return self.completions.queue_and_stream(requested, on_error=on_error)

    @checked(llm_arguments.CHAT, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora_request: Adapters = None,
    ) -> RequestOutputs:
        """Answers one conversation, a list of messages, or several, a list of such lists."""
        tokenizer, prompts, many = self.get_tokenizer(), [], conversations(messages)
        template = chat_template or self._chat_template or None
        variables = check_variables(chat_template_kwargs) | dict(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        for conversation in many:
            text = tokenizer.render_chat(conversation, variables, chat_template=template)
            # The template has written the special tokens itself.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    @checked(llm_arguments.METHODS, elsewhere=llm_arguments.PROMPTS_ELSEWHERE)
    def beam_search(
        self, prompts: Any, params: beam.BeamSearchParams, *, lora_request: Adapters = None,
        use_tqdm: Bar = True,
    ) -> list[beam.BeamSearchOutput]:  # fmt: skip
        """Returns the `beam_width` likeliest continuations that a beam search finds, best first."""
        parsed = parse_prompts(prompts)
        adapters = read_adapters(lora_request, len(parsed))
        return beam.search(
            self.completions, parsed, params, lora_requests=adapters, use_tqdm=use_tqdm
        )

    @checked(llm_arguments.METHODS)
    def loglikelihood(
        self, pairs: Sequence[tuple[Any, Any]], *, use_tqdm: Bar = True
    ) -> Loglikelihood:
        """Returns the logprob of each continuation after its context, and whether it is greedy's.

        pairs: (context, continuation), each a text or token ids. A text is split as lm-eval does:
            trailing spaces of the context belong to the continuation. An empty context is BOS.
        """
        return loglikelihood(self.completions, pairs, use_tqdm=use_tqdm)

    @checked(llm_arguments.SCORE)
    def score_tokens(
        self, prompts: Any, *, start: int = 1, routed_experts: Sequence[Any] | None = None,
        use_tqdm: Bar = True,
    ) -> list[TokenScores]:  # fmt: skip
        """Returns the logprob of each token of prompts, from position `start` on, as arrays.

        routed_experts: for each prompt the experts that compute it, int16 [tokens, layers, k], as
            `CompletionOutput.routed_experts` has them.
        """
        parsed, routes = parse_prompts(prompts), dict(routed_experts=routed_experts)
        starts = [start] * len(parsed)
        return score(self.completions, parsed, starts, use_tqdm=use_tqdm, **routes)

    @checked(llm_arguments.ABORT)
    def abort(self, request_id: str) -> None:
        """Ends a waiting or running request, whose output says so. Unknown ids are ignored."""
        self.completions.abort(request_id)

    @checked(llm_arguments.SCALE)
    def scale_elastic_ep(
        self, new_tensor_parallel_size: int | None = None, new_data_parallel_size: int | None = None
    ) -> None:
        """Moves experts and all else to other numbers of devices (None: as now); requests go on."""
        self.engine = scale(self.completions, new_tensor_parallel_size, new_data_parallel_size)
        self.memory_plan = self.engine.worker.memory_plan

    def _or_defaults(self, params: Any) -> Any:
        return self._defaults if params is None else params


def _compiler_maker(of: Loaded) -> Callable | None:
    if of.tokenizer is None:
        return None
    sizes = dict(vocab_size=of.config.vocab_size, eos_token_ids=of.eos_token_ids)
    return functools.partial(GrammarCompiler, of.tokenizer, **sizes)
