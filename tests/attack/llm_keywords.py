"""The keywords of `LLM(...)`, on a checkpoint so small that those that are good cost little."""

from collections.abc import Iterator, Mapping
from pathlib import Path
import random
from typing import Any

from jaxrunner import LLM
from jaxrunner.loading import llm_arguments
from jaxrunner.rule import Rule
from jaxrunner.text.tokenizer import Tokenizer
from tests.attack import calls, models
from tests.attack.calls import Target
from tests.attack.harness import Case, Entry
from tests.attack.kinds import Kind, flag, integer, is_one_of, one_of, real, several, size, text

BUCKETS = Kind(
    lambda v: several(size(1, 0, 2**20), None).good(v), ([0], [2, 1], [1, 1], "ab", [1.0], 3)
)
WORKS = (True, "all", "background")  # of `warm_up`: good, and they compile for long


def _folder(value: Any) -> bool | None:
    """Folders that are there may hold a model or not; there is no hub to ask."""
    return None if isinstance(value, str | Path) else False


def _mapping(value: Any) -> bool | None:
    return True if value is None else None if isinstance(value, Mapping) else False


LOADING: dict[str, Kind] = dict(
    model=Kind(_folder, (None, 3, b"a/b", "a/b/c", "nobody/nothing", "", "\0", [], True)),
    tokenizer=Kind(lambda v: True if v is None else None if isinstance(v, str | Path | Tokenizer)
                   else False, (3, b"a", "", "\0", "none/such", [], True, 0, {})),
    skip_tokenizer_init=flag(), revision=text(None),
    dtype=Kind(lambda v: None if isinstance(v, str) else False, (3, None, float, True, ["auto"])),
    seed=size(0, 2**31, 2**64, None),
    hf_overrides=Kind(_mapping, ([("a", 1)], "a", {1: 2}, {"vocab_size": None}, True)),
    load_format=Kind(one_of("auto", "dummy", "sharded_state").good, ("Auto", "", None, 3, "pt")),
    model_loader_extra_config=Kind(_mapping, ([], "a", {"pattern": 3}, {1: 2}, True)),
    generation_config=one_of("auto", "vllm"), check_nan=flag(), use_tqdm=flag(),
)  # fmt: skip
SIZES: dict[str, Kind] = dict(
    max_model_len=Kind(lambda v: is_one_of(v, (-1, None)) or size(1, 128, 128).good(v),
                       (0, -2, 129, 48.0, "48", True, [48])),
    max_num_seqs=size(1, 64, 10**9), max_num_batched_tokens=size(1, 64, 10**9, None),
    block_size=size(1, 64, 10**9), num_blocks=size(1, 512, 10**12, None),
    token_buckets=BUCKETS, decode_buckets=BUCKETS, enable_prefix_caching=flag(),
    policy=one_of("fcfs", "priority"), async_depth=size(1, 8, 10**9),
    num_decode_steps=size(1, 8, 10**9),
    kv_cache_dtype=Kind(lambda v: None if isinstance(v, str) else False, (3, None, "FP8", True)),
    logprobs_mode=one_of("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    nan_policy=one_of("error", "raise", "ignore"), enforce_eager=flag(),
    step_timeout_s=real(0.001, 2**30, None),
    attention_backend=Kind(lambda v: None if is_one_of(v, ("mosaic_gpu",)) else
                           is_one_of(v, ("auto", "reference")), ("Auto", "", None, 3)),
)  # fmt: skip
OWN: dict[str, Kind] = dict(
    chat_template=text(None), cache_dir=Kind(lambda v: True if v is None else None if
                                             isinstance(v, str | Path) else False, (3, True, b"a")),
    warm_up=Kind(lambda v: v is False, (0, None, "", "none", "ALL", [], 2, -1, ["all"])),
    logits_fn=Kind(lambda v: True if v is None else None if callable(v) or isinstance(v, Rule)
                   else False, (3, "softmax", [len], {}, True)),
)  # fmt: skip
# Of other models than the one that is attacked, of the hub, and of several devices.
SOME = Kind(lambda v: None if v is True else flag().good(v), flag().near)
MAPPING = Kind(_mapping, ([], "a", {1: 2}, {"a": 1}, {"method": 3}, {"task": []}, True, ()))
COUNT = size(1, 1, 1024)
NONE = Kind(lambda v: v is None, (0, 1, 16, -1, "16", True, 1.5, [16], 2**40))
MORE: dict[str, Kind] = dict(
    download_dir=OWN["cache_dir"], tokenizer_revision=text(None),
    hf_token=text(None, True, False)._replace(near=(b"a", 3, ["a"], {"a": "b"}, 1.5)),
    max_logprobs=integer(-1, 2**30, None), override_generation_config=MAPPING,
    long_prefill_token_threshold=integer(0, 2**30), tensor_parallel_size=COUNT,
    data_parallel_size=COUNT, pipeline_parallel_size=COUNT, decode_context_parallel_size=COUNT,
    disable_custom_all_reduce=flag(), batch_invariant=flag(),
    cp_kv_cache_interleave_size=size(1, 1, 2**16), enable_expert_parallel=SOME, enable_eplb=SOME,
    all2all_backend=Kind(
        lambda v: v == "allgather_reducescatter" if type(v) is str else False,
        ("pplx", "", None, 3, "ragged_all_to_all"),
    ), all2all_token_threshold=NONE,
    enable_return_routed_experts=SOME, eplb_config=MAPPING, enable_lora=SOME,
    max_loras=size(1, 1, 1024), max_lora_rank=size(1, 1, 512),
    max_cpu_loras=size(1, 1, 2**20, None),
    lora_modules_to_save=Kind(lambda v: None if v else v in (None, [], ()),
                              (["lm_head"], "lm_head", 3, True, [3], ["a"] * 3)),
    quantization=Kind(lambda v: v is None or (None if isinstance(v, str) else False),
                      ("FP8", "awq", "", 8, True, {})),
    runner=Kind(lambda v: v == "generate" if type(v) is str else False, ("Pooling", "", None, 3)),
    pooler_config=MAPPING, speculative_config=MAPPING,
    # Of models with states, which the attacked one is not.
    mamba_block_size=NONE, num_state_checkpoints=NONE,
)  # fmt: skip
ROOM: dict[str, Kind] = dict(
    kv_cache_memory_bytes=size(1, 2**24, 2**62, None),
    gpu_memory_utilization=real(0.001, 1, None),
)
ALL = LOADING | SIZES | OWN | MORE
# What has no bounds is a function.
assert {*ALL, *ROOM} == llm_arguments.LLM.keys() | {"logits_fn"}


def _open(**fields: Any) -> None:
    fields = dict(model=str(models.checkpoint())) | fields
    LLM(**fields).close()


class Keywords(Entry):
    """`LLM(...)`; the canary is an LLM's of the same process."""

    targets = (
        Target("LLM", _open, ALL, lambda: dict(models.SIZES)),
        Target("LLM", _open, SIZES | ROOM, lambda: {**models.SIZES, "num_blocks": None}),
    )

    def __init__(self) -> None:
        self.neighbour = models.llm()

    def case(self, rng: random.Random) -> Case:
        while True:
            state = rng.random()
            made = calls.case(random.Random(state), self.targets)
            if not any(f"warm_up={v!r}" in made.told for v in WORKS):
                return made._replace(fields=(*made.fields, *_also(made)))

    def canary(self) -> Iterator[Any]:
        return models.streamed(self.neighbour)

    def close(self) -> None:
        self.neighbour.close()


def _also(made: Case) -> Iterator[str]:
    """Yields what else a refusal may name: files that a field leads to."""
    if "model" in made.fields or "tokenizer" in made.fields:
        yield r"config\.json|tokenizer\.json"
    if "load_format" in made.fields:
        yield "sharded_state"
    if "hf_overrides" in made.fields:
        yield r"config\.json"
