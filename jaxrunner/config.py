"""Configs of models and engines: frozen, hashable, compiled in. Knows no device."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.caches.cache_group import CacheKind
from jaxrunner.hf_config import Settings

DTYPES = ("float32", "bfloat16", "float16")
# Dtypes of a KV cache with scales, in vLLM's names, and what JAX calls them.
SCALED = dict(fp8="float8_e4m3fn", fp8_e4m3="float8_e4m3fn", int8="int8")
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
NAN_POLICIES = ("error", "raise", "ignore")
POLICIES = ("fcfs", "priority")
MAX_ID = 2**31  # of a token: int32 on the device
# Ranks of places on the device: sums of a token must not depend on its adapter's place.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 512)
ATTENTION_BACKENDS = ("auto", "mosaic_gpu", "reference")


class ModelConfig(Protocol):
    """The settings of a model that an engine needs. Each family has a frozen dataclass of them.

    A family may have more members, which others do without: `task` ("generate" where it is left
    out), `code` (functions besides the model's own that a cached program depends on),
    `first_position` (of a token, where that is not 0), `sparse` (of each layer, whether it has
    experts), `concurrent_kernels` (whether a step's independent kernels may run at once, None for
    steps of few tokens alone; calls of `ops.mlp`, `ops.experts` and attention must then depend on
    the call before). Configs that wrap a family's own, for devices, quantised weights, adapters or
    drafts, have theirs: see `parallel`, `quantization`, `mixtures.wrapped`, `speculators.drafter`.
    """

    @property
    def architecture(self) -> str:
        """Its name in config.json's `architectures`."""
        ...

    @property
    def vocab_size(self) -> int:
        """Columns of the logits, V."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states, E."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers, Y."""
        ...

    @property
    def longest_len(self) -> int:
        """The most tokens of a sequence."""
        ...

    @property
    def dtype(self) -> str:
        """Dtype that its checkpoint is stored in."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text."""
        ...

    @property
    def cache_kinds(self) -> tuple[CacheKind, ...]:
        """The cache kind of each layer, then, for layers with two caches, their second kinds."""
        ...

    @property
    def dims(self) -> dict[str, Any]:
        """Sizes of axes and flags of its weights and caches; Y, V, E, H, K, D and F among them."""
        ...

    def cache_salt(self, prompt_len: int) -> bytes:
        """Returns bytes that a prompt's keys depend on besides its tokens; b"" for nothing."""
        ...


class WrappingConfig:
    """A config around another one, whose attributes it has besides its own."""

    INNER: ClassVar[str] = "plain"  # the field that holds the other one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == self.INNER:  # asked while it is unpickled
            raise AttributeError(name)
        return getattr(getattr(self, self.INNER), name)


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and policies of an engine. Counts are of tokens, requests or blocks."""

    max_model_len: int
    num_blocks: int
    block_size: int = 64  # tokens of a block, on each of the devices that share out tokens
    max_num_seqs: int = 256  # of a step; as many are at work for each stage of a pipeline
    max_num_batched_tokens: int = 8192
    token_buckets: tuple[int, ...] = ()  # sizes of steps with a prefill; powers of two where empty
    decode_buckets: tuple[int, ...] = ()  # sizes of steps where each request decodes; likewise
    enable_prefix_caching: bool = True
    mamba_block_size: int | None = None  # tokens between checkpoints of states; None for none
    num_state_checkpoints: int | None = None  # the least that are kept; None: one a slot
    policy: str = "fcfs"
    long_prefill_token_threshold: int = 0  # most tokens of a request in a step; 0 for no limit
    async_depth: int = 2  # launches before the oldest is read
    num_decode_steps: int = 1  # steps of one launch, where all requests decode
    kv_dtype: str = "float32"  # in JAX's name
    dtype: str = "float32"
    seed: int = 0
    logprobs_mode: str = "raw_logprobs"  # the meaning of `Logprob.logprob`
    nan_policy: str = "error"  # for NaN or infinite logits: end the request, raise, or ignore
    # Counts from a step's launch or the end of the one before. Not in `repr`, which snapshots
    # compare.
    step_timeout_s: float | None = field(default=600.0, repr=False)
    attention_backend: str = "auto"  # kernels where they serve the model, or one by name
    enforce_eager: bool = False  # nothing is compiled: each operation runs by itself
    enable_lora: bool = False  # whether requests may have adapters
    max_loras: int = 1  # adapters on the device, and of the requests of one step
    max_lora_rank: int = 16  # of each of them
    max_cpu_loras: int | None = None  # on the host, those on the device among them; None for all
    lora_modules_to_save: tuple[str, ...] = ()  # embedding and head that adapters may have instead
    # Whether devices leave all of their sums to XLA. Not in `repr`, as a snapshot fits both.
    disable_custom_all_reduce: bool = field(default=False, repr=False)
    batch_invariant: bool = False  # bits of a request do not go by the others of its steps

    def __post_init__(self):
        counts = ("max_model_len", "num_blocks", "block_size", "max_num_seqs",
                  "max_num_batched_tokens", "async_depth", "num_decode_steps")  # fmt: skip
        for name, least in (
            dict.fromkeys(counts, 1) | dict(long_prefill_token_threshold=0)
        ).items():
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, got {shown(value)}"
                )
        limit = Bound(float, 1e-3, 2**30, optional=True)
        validate("step_timeout_s", self.step_timeout_s, limit)
        flags = "enable_prefix_caching", "enforce_eager", "disable_custom_all_reduce"
        for name in (*flags, "batch_invariant"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name} must be True or False, got {shown(getattr(self, name))}")
        check_checkpoints(self)
        check_lora(self.enable_lora, self.max_loras, self.max_lora_rank, self.max_cpu_loras)
        check_lora_modules(self.enable_lora, self.lora_modules_to_save)
        check_dtype("dtype", self.dtype)
        check_dtype("kv_dtype", self.kv_dtype, (*DTYPES, *dict.fromkeys(SCALED.values())))
        named = dict(logprobs_mode=LOGPROBS_MODES, nan_policy=NAN_POLICIES, policy=POLICIES)
        for name, known in (named | dict(attention_backend=ATTENTION_BACKENDS)).items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {shown(getattr(self, name))}")
        for name in ("token_buckets", "decode_buckets"):
            sizes = getattr(self, name)
            if list(sizes) != sorted(set(sizes)) or any(s < 1 for s in sizes):
                raise ValueError(f"{name} must be ascending sizes over 0, got {sizes}")

    @property
    def scaled(self) -> bool:
        """Whether keys and values are of 8 bits."""
        return self.kv_dtype in SCALED.values()


def check_checkpoints(engine: EngineConfig) -> None:
    """Checks the settings of checkpoints of recurrent states.

    Raises:
      TypeError, ValueError: a size that cannot be, or one without prefix caching.
    """
    interval, num = engine.mamba_block_size, engine.num_state_checkpoints
    validate("mamba_block_size", interval, Bound(int, 1, 2**30, optional=True))
    validate("num_state_checkpoints", num, Bound(int, 1, 2**20, optional=True))
    if interval is not None and not engine.enable_prefix_caching:
        raise ValueError(
            f"mamba_block_size={interval} needs prefix caching: set enable_prefix_caching=True, or "
            "leave it out"
        )
    if interval is not None and interval % engine.block_size:
        raise ValueError(
            f"mamba_block_size={interval} must be a multiple of block_size={engine.block_size}"
        )
    if interval is None and num is not None:
        raise ValueError(
            f"num_state_checkpoints={num} needs mamba_block_size: set it too, or leave this out"
        )


def check_lora(
    enable_lora: bool, max_loras: int, max_lora_rank: int, max_cpu_loras: int | None
) -> None:
    """Checks how many adapters an engine has room for.

    Raises:
      TypeError, ValueError: a size that cannot be, or one without `enable_lora`.
    """
    validate("enable_lora", enable_lora, Bound(bool))
    validate("max_loras", max_loras, Bound(int, 1, 1024))
    validate("max_lora_rank", max_lora_rank, Bound(int, 1, 512))
    if max_lora_rank not in LORA_RANKS:
        raise ValueError(
            f"max_lora_rank must be one of {LORA_RANKS}, got {max_lora_rank}: take the next larger"
        )
    validate("max_cpu_loras", max_cpu_loras, Bound(int, max_loras, 2**20, optional=True))
    if not enable_lora and (max_loras, max_lora_rank, max_cpu_loras) != (1, 16, None):
        raise ValueError(
            f"max_loras={max_loras}, max_lora_rank={max_lora_rank} and max_cpu_loras="
            f"{max_cpu_loras} are of an engine with adapters: set enable_lora=True, or leave them "
            "out"
        )


def check_lora_modules(enable_lora: bool, names: tuple[str, ...]) -> None:
    """Checks which modules of the model adapters may replace; raises as `check_lora`."""
    validate("lora_modules_to_save", names, Bound(str, each=True, most=2))
    if names and not enable_lora:
        raise ValueError(
            f"lora_modules_to_save={shown(names)} is of an engine with adapters: set "
            "enable_lora=True, or leave it out"
        )


def check_dtype(name: str, value: Any, known: tuple[str, ...] = DTYPES) -> str:
    """Returns `value`, one of the `known` dtypes: those that models compute in.

    Raises:
      ValueError: it is none of them.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {known}, got {shown(value)}")
    return value


def read_kv_dtype(value: str, dtype: str) -> str:
    """Returns JAX's name of a user's `kv_cache_dtype`; "auto" is the model's `dtype`.

    Raises:
      ValueError: it is none.
    """
    known = dict(auto=dtype) | {name: name for name in DTYPES} | SCALED
    return known[check_dtype("kv_cache_dtype", value, tuple(known))]


def read_dtype(settings: Settings) -> str:
    """Returns the dtype a checkpoint says it is stored in (`dtype`, or `torch_dtype` of old)."""
    value = settings.take("torch_dtype", str, settings.take("dtype", str, "float32"))
    return check_dtype("dtype of config.json", value.removeprefix("torch."))


def read_token_ids(settings: Settings, key: str) -> tuple[int, ...]:
    """Returns the ids of a special token: none, one, or a list in the file, which has -1 for none.

    Raises:
      ValueError: a value is no id.
    """
    value = settings.take(key, (int, list), [])
    ids = tuple(value) if isinstance(value, list) else (value,)
    for token_id in ids:
        if type(token_id) is not int or not -1 <= token_id < MAX_ID:
            raise ValueError(f"{key} must be ids from 0 to {MAX_ID - 1}, got {shown(token_id)}")
    return tuple(token_id for token_id in ids if token_id >= 0)


def read_over_0(key: str, value: float) -> float:
    """Returns a value of `key`.

    Raises:
      ValueError: it is not over 0.
    """
    if value <= 0:
        raise ValueError(f"{key} must be over 0, got {value}")
    return value


def read_scale(settings: Settings, key: str, default: float = 1.0) -> float:
    """Returns the value of a scale.

    Raises:
      ValueError: it is not over 0.
    """
    return read_over_0(key, settings.take(key, float, default))
