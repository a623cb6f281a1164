"""Keys of vLLM's `speculative_config` that are taken where they ask for what is done anyway.

Knows no JAX.
"""

from jaxrunner.api.arguments import Elsewhere

_WITH_TARGET = "the devices of the target draft as well: leave it out"
_AS_TARGET = "drafts are made as the target is run: leave it out"
ELSEWHERE: dict[str, Elsewhere] = {
    "draft_tensor_parallel_size": Elsewhere(_WITH_TARGET, (1, None)),
    "enforce_eager": Elsewhere("set enforce_eager of the engine"),
    "quantization": Elsewhere("the drafter's config.json says how its weights are held"),
    "kv_cache_dtype": Elsewhere(_AS_TARGET),
    "attention_backend": Elsewhere(_AS_TARGET),
    "max_model_len": Elsewhere(_AS_TARGET),
    "revision": Elsewhere("name a folder as model"),
    "code_revision": Elsewhere("code of a checkpoint is never run: leave it out"),
    "parallel_drafting": Elsewhere("drafts follow one another: leave it out", (False, None)),
    "disable_padded_drafter_batch": Elsewhere("batches are padded: leave it out", (False, None)),
    "suffix_decoding_max_cached_requests": Elsewhere(
        "their tokens are counted: set suffix_decoding_max_cached_tokens, 0 for none"
    ),
    "use_heterogeneous_vocab": Elsewhere(
        "draft and target need one vocabulary: take such a model", (False, None)
    ),
}
