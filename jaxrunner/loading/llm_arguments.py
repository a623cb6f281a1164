"""The arguments of `LLM` and its methods: bounds of ours, and vLLM's other ones.

A keyword of vLLM that has no setting here is taken where its value asks for what is done anyway,
and else refused with what to do instead. Knows no JAX.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrunner.api.arguments import Elsewhere
from jaxrunner.api.validation import Bound
from jaxrunner.pooling.params import PoolerConfig
from jaxrunner.text.tokenizer import Tokenizer

COUNT = 2**30
FLAG = Bound(bool)
TEXT = Bound(str)
TEXT_OR_NONE = Bound(str, optional=True)
FOLDER_OR_NONE = Bound(str, optional=True, also=(Path,))
DICT_OR_NONE = Bound(dict, optional=True)
BUCKETS = Bound(int, 1, 2**24, each=True, most=1024)
MODEL: dict[str, Bound] = {  # and its weights
    "model": Bound(str, also=(Path,)),
    "revision": TEXT_OR_NONE,
    "download_dir": FOLDER_OR_NONE,
    "hf_token": Bound(str, optional=True, also=(bool,)),
    "dtype": TEXT,
    "seed": Bound(int, 0, 2**63 - 1),
    "load_format": TEXT,
    "model_loader_extra_config": DICT_OR_NONE,
    "hf_overrides": DICT_OR_NONE,
    "quantization": TEXT_OR_NONE,
    "runner": TEXT,
    "pooler_config": Bound(dict, optional=True, also=(PoolerConfig,)),
    "speculative_config": DICT_OR_NONE,
    "tensor_parallel_size": Bound(int, 1, 1024),
    "decode_context_parallel_size": Bound(int, 1, 1024),
    "cp_kv_cache_interleave_size": Bound(int, 1, 2**16),
    "pipeline_parallel_size": Bound(int, 1, 1024),
    "enable_expert_parallel": FLAG,
    "enable_return_routed_experts": FLAG,
    "enable_eplb": FLAG,
    "eplb_config": DICT_OR_NONE,
    "all2all_backend": TEXT,
    "all2all_token_threshold": Bound(int, 1, COUNT, optional=True),
    "check_nan": FLAG,
    "cache_dir": FOLDER_OR_NONE,
}
SIZES: dict[str, Bound] = {
    "kv_cache_dtype": TEXT,
    "max_model_len": Bound(int, -1, COUNT, optional=True),
    "max_num_seqs": Bound(int, 1, 2**16),
    "max_num_batched_tokens": Bound(int, 1, 2**24, optional=True),
    "num_blocks": Bound(int, 1, COUNT, optional=True),
    "block_size": Bound(int, 1, 2**16),
    "kv_cache_memory_bytes": Bound(int, 1, 2**62, optional=True),
    "gpu_memory_utilization": Bound(float, 0, 1, optional=True),
    "token_buckets": BUCKETS,
    "decode_buckets": BUCKETS,
    "enable_prefix_caching": FLAG,
    "mamba_block_size": Bound(int, 1, COUNT, optional=True),
    "num_state_checkpoints": Bound(int, 1, 2**20, optional=True),
    "policy": TEXT,
    "long_prefill_token_threshold": Bound(int, 0, COUNT),
    "async_depth": Bound(int, 1, 1024),
    "num_decode_steps": Bound(int, 1, 1024),
    "logprobs_mode": TEXT,
    "nan_policy": TEXT,
    "step_timeout_s": Bound(float, 1e-3, COUNT, optional=True),
    "attention_backend": TEXT,
    "enforce_eager": FLAG,
    "enable_lora": FLAG,
    "max_loras": Bound(int, 1, 1024),
    "max_lora_rank": Bound(int, 1, 512),
    "max_cpu_loras": Bound(int, 1, 2**20, optional=True),
    "lora_modules_to_save": Bound(str, each=True, most=2),
    "disable_custom_all_reduce": FLAG,
    "batch_invariant": FLAG,
}
TEXTS: dict[str, Bound] = {
    "tokenizer": Bound(str, optional=True, also=(Path, Tokenizer)),
    "skip_tokenizer_init": FLAG,
    "tokenizer_revision": TEXT_OR_NONE,
    "generation_config": TEXT,
    "override_generation_config": DICT_OR_NONE,
    "chat_template": TEXT_OR_NONE,
    "warm_up": Bound(bool, among=(False, True, "all", "background")),
    "use_tqdm": FLAG,
    "max_logprobs": Bound(int, -1, COUNT, optional=True),
}
WORKER: dict[str, Bound] = MODEL | SIZES | {"rank": Bound(int, 0, 1023, optional=True)}
LLM: dict[str, Bound] = MODEL | SIZES | TEXTS | {"data_parallel_size": Bound(int, 1, 1024)}
RENAMED: dict[str, str] = {
    "scheduling_policy": "policy",
    "num_gpu_blocks_override": "num_blocks",
    "use_tqdm_on_load": "use_tqdm",
    "dcp_kv_cache_interleave_size": "cp_kv_cache_interleave_size",
}
SPELLED: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "seed": {None: 0},
}
_OUT = "leave it out"
_ONE_PROCESS = (
    f"one process runs the model; {_OUT}, or set tensor_parallel_size or data_parallel_size for "
    "several devices"
)
_TEXT_ALONE = f"prompts are text or token ids; {_OUT}"
_COMPILED = "programs are compiled by size; see token_buckets, decode_buckets and enforce_eager"
_PROMPT_ADAPTERS = "adapters of prompts are not read, those of weights are: see LoRARequest"
_SERVER = f"there is no server; {_OUT}"
_CONFIG = "pass hf_overrides, which replaces keys of config.json"
_SAFETENSORS = "weights come from safetensors in a folder or on the hub; convert others first"
_GRAMMARS = "llguidance compiles every grammar; see StructuredOutputsParams"
ELSEWHERE: dict[str, Elsewhere] = {
    **dict.fromkeys(
        ("nnodes", "prefill_context_parallel_size"),
        Elsewhere(_ONE_PROCESS, (1, None)),
    ),
    "distributed_executor_backend": Elsewhere(_ONE_PROCESS, (None, "uni")),
    "max_parallel_loading_workers": Elsewhere(_ONE_PROCESS),
    "ray_workers_use_nsight": Elsewhere(_ONE_PROCESS, (False,)),
    "cpu_offload_gb": Elsewhere(
        f"weights stay on the device; {_OUT}, or set tensor_parallel_size or quantization",
        (0, 0.0, None),
    ),
    "swap_space": Elsewhere(
        f"a preempted request is computed again, no cache is swapped; {_OUT}", (0, 0.0, None)
    ),
    "preemption_mode": Elsewhere(
        f"a preempted request is computed again; {_OUT}", (None, "recompute")
    ),
    "kv_offloading_size": Elsewhere(f"caches stay on the device; {_OUT}"),
    "kv_transfer_config": Elsewhere("save_state and restore_state move requests with their caches"),
    "trust_remote_code": Elsewhere(
        f"code of a checkpoint is never run; {_OUT}, architectures that are known need none",
        (False,),
    ),
    "enable_chunked_prefill": Elsewhere(
        f"long prompts are always computed in chunks; {_OUT}", (True, None)
    ),
    "disable_log_stats": Elsewhere("get_metrics tells them", each=bool),
    "enable_sleep_mode": Elsewhere("sleep and wake_up are always there", each=bool),
    "tokenizer_mode": Elsewhere(
        f"tokenizer.json alone is read; {_OUT}", ("auto", "hf", "fast", None)
    ),
    "task": Elsewhere("runner='pooling' pools; see pooler_config", ("auto", "generate", None)),
    "convert": Elsewhere("runner='pooling' pools what generates, too", ("auto", "none", None)),
    "override_pooler_config": Elsewhere("pooler_config is what it is called here"),
    "max_num_partial_prefills": Elsewhere("prompts share a step as they fit", (1, None)),
    "max_long_partial_prefills": Elsewhere("prompts share a step as they fit", (1, None)),
    "num_scheduler_steps": Elsewhere("num_decode_steps=... is what it is called here", (1, None)),
    "num_lookahead_slots": Elsewhere(
        "speculative_config says how many tokens are drafted", (0, None)
    ),
    "speculative_model": Elsewhere("speculative_config names it"),
    "async_scheduling": Elsewhere("async_depth=1 reads each step at once", (True, None)),
    "disable_async_output_proc": Elsewhere("async_depth=1 reads each step at once", (False, None)),
    "stream_interval": Elsewhere(f"stream tells each token; {_OUT}", (1, None)),
    "scheduler_cls": Elsewhere("drive a ModelRunner by a scheduler of your own"),
    "worker_cls": Elsewhere("jaxrunner.worker.worker has the worker", ("auto", None)),
    "worker_extension_cls": Elsewhere("collective_rpc takes a function", ("", None)),
    "use_v2_block_manager": Elsewhere(_OUT, each=bool),
    "prefix_caching_hash_algo": Elsewhere("blocks are named by SHA-256", ("sha256", None)),
    "disable_sliding_window": Elsewhere("lower max_model_len instead", (False,)),
    "disable_cascade_attn": Elsewhere(_OUT, each=bool),
    "disable_hybrid_kv_cache_manager": Elsewhere(
        f"layers with a window have a cache of their own; {_OUT}", (False, None)
    ),
    "calculate_kv_scales": Elsewhere("each token and head has a scale of its own", each=bool),
    "lora_dtype": Elsewhere("adapters have the dtype of the model", ("auto", None)),
    "fully_sharded_loras": Elsewhere("adapters are cut as the weights are", (False,)),
    "enable_prompt_adapter": Elsewhere(_PROMPT_ADAPTERS, (False, None)),
    "enable_prompt_embeds": Elsewhere(_TEXT_ALONE, (False, None)),
    "limit_mm_per_prompt": Elsewhere(_TEXT_ALONE, (None, {})),
    "mm_processor_kwargs": Elsewhere(_TEXT_ALONE, (None, {})),
    "mm_processor_cache_gb": Elsewhere(_TEXT_ALONE, (0, 0.0, None)),
    "disable_mm_preprocessor_cache": Elsewhere(_TEXT_ALONE, each=bool),
    "allowed_local_media_path": Elsewhere(_TEXT_ALONE, ("", None)),
    "compilation_config": Elsewhere(_COMPILED, (None, {})),
    "optimization_level": Elsewhere(_COMPILED),
    "cudagraph_capture_sizes": Elsewhere(_COMPILED),
    "max_seq_len_to_capture": Elsewhere(_COMPILED),
    "rope_scaling": Elsewhere(_CONFIG),
    "rope_theta": Elsewhere(_CONFIG),
    "hf_config_path": Elsewhere(_CONFIG),
    "config_format": Elsewhere("config.json alone is read", ("auto", "hf")),
    "model_impl": Elsewhere("models/registry.py lists the architectures", ("auto", None)),
    "code_revision": Elsewhere("code of a checkpoint is never run"),
    "safetensors_load_strategy": Elsewhere(_SAFETENSORS, ("lazy", None)),
    "ignore_patterns": Elsewhere(_SAFETENSORS),
    "guided_decoding_backend": Elsewhere(_GRAMMARS, ("auto", "guidance", None)),
    "structured_outputs_config": Elsewhere(
        _GRAMMARS, (None, {}, {"backend": "auto"}, {"backend": "guidance"})
    ),
    "reasoning_parser": Elsewhere("outputs are the model's text, to be parsed by you", ("", None)),
    "logits_processors": Elsewhere("logits_fn=... takes a function of the logits", (None, [])),
    "profiler_config": Elsewhere("start_profile takes the folder"),
    "device": Elsewhere("JAX takes the first device that it has; see JAX_PLATFORMS", ("auto",)),
    "served_model_name": Elsewhere(_SERVER),
    "additional_config": Elsewhere(_OUT, (None, {})),
    "otlp_traces_endpoint": Elsewhere("start_profile records a trace"),
}  # fmt: skip
_OF_LLM: dict[str, Elsewhere] = {
    "data_parallel_size": Elsewhere("a worker is one of those that LLM has of it", (1, None))
}
OF_VLLM: dict[str, Any] = dict(elsewhere=ELSEWHERE, renamed=RENAMED, spelled=SPELLED)
OF_WORKER: dict[str, Any] = OF_VLLM | dict(elsewhere=ELSEWHERE | _OF_LLM)
_TQDM = Bound(bool, also=(Callable,))
ON_ERROR: dict[str, Bound] = {"on_error": Bound(str, among=("return", "raise"))}
METHODS: dict[str, Bound] = {"use_tqdm": _TQDM}
SCORE: dict[str, Bound] = METHODS | {"start": Bound(int, 0, COUNT)}
GENERATE: dict[str, Bound] = METHODS | ON_ERROR
SCALE: dict[str, Bound] = dict.fromkeys(
    ("new_tensor_parallel_size", "new_data_parallel_size"), Bound(int, 1, 1024, optional=True)
)
POOLING: dict[str, Bound] = METHODS | {
    "pooling_task": TEXT_OR_NONE,
    "truncate_prompt_tokens": Bound(int, -1, COUNT, optional=True),
}
ABORT: dict[str, Bound] = {"request_id": TEXT}
CHAT: dict[str, Bound] = {
    "use_tqdm": _TQDM,
    "chat_template": TEXT_OR_NONE,
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template_kwargs": DICT_OR_NONE,
}
PROMPTS_ELSEWHERE: dict[str, Elsewhere] = {
    "prompt_adapter_request": Elsewhere(_PROMPT_ADAPTERS),
    "mm_processor_kwargs": Elsewhere(_TEXT_ALONE, (None, {})),
    "tokenization_kwargs": Elsewhere(
        "SamplingParams has truncate_prompt_tokens, and token ids are taken as they are", (None, {})
    ),
    "prompt_token_ids": Elsewhere('prompts may be {"prompt_token_ids": [...]}, or a list of them'),
    "guided_options_request": Elsewhere("SamplingParams has structured_outputs"),
    "concurrency_limit": Elsewhere(_OUT),
    "chat_template_content_format": Elsewhere(
        "contents reach the template as text", ("auto", "string")
    ),
}
