"""Methods of vLLM's `LLM` and worker that are not here, and what to do instead. Knows no JAX."""

from typing import Any

_WEIGHTS = "see start_weight_update, update_weights, finish_weight_update and update_params"
INSTEAD: dict[str, str] = {
    "save_tensorized_model": "save_sharded_state writes safetensors, save_params what orbax reads",
    "init_weight_transfer_engine": _WEIGHTS,
    "enqueue": "stream answers prompts as others come, and Engine.add queues one",
    "wait_for_completion": "stream answers prompts as others come, and Engine.step runs them",
    "get_encoder_timing_stats": "there are no encoders of images",
    "get_cache_block_size_bytes": "get_kv_cache_spec of worker.worker.Worker tells page_size_bytes",
    "initialize_cache": "initialize_from_config of worker.worker.Worker makes the caches",
    "set_tokenizer": "LLM(tokenizer=...) takes a folder or a Tokenizer",
    "preprocess_chat": "get_tokenizer().apply_chat_template renders a conversation",
    "start_server": "there is no server",
}


class NotHere:
    """Raises, for methods of vLLM that are not here, what to use instead; `hasattr` is False."""

    def __getattr__(self, name: str) -> Any:
        kind = type(self).__name__
        instead = f": {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"{kind} has no {name!r}{instead}", name=name, obj=self)
