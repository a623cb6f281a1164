"""An adapter's files, its settings, and the low ranks that it has."""

from collections.abc import Hashable, Mapping
import math
from pathlib import Path
import re
from typing import Any

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.hf_config import read_json
from jaxrunner.loading import safetensors_file
from jaxrunner.lora.adapter import LowRank

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PART = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(\.\w+)?\.weight")
LONGEST = 1000  # characters of a pattern
# Patterns that Python's `re` may search for ever: groups that repeat, and many repetitions.
REPEATED_GROUP, REPETITION, MOST_REPETITIONS = re.compile(r"\)[*+{]"), re.compile(r"[*+{]"), 4
# Settings that change no outputs: of training, of initial weights, of the tools used.
HARMLESS = frozenset(
    """auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    exclude_modules fan_in_fan_out inference_mode init_lora_weights layers_pattern
    layers_to_transform loftq_config lora_dropout lora_ga_config low_cpu_mem_usage
    megatron_core peft_version qalora_group_size revision runtime_config target_modules
    task_type""".split()
)
# Initializations that change the base model too: PEFT computes the adapters from its weights.
CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias"}


def read_folder(folder: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the config and the tensors of an adapter.

    Raises:
      FileNotFoundError, ValueError: a file is missing, or none that PEFT writes.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"lora_path must be a folder with {CONFIG}, got {folder}")
    config, path = read_json(folder / CONFIG), folder / WEIGHTS
    header = safetensors_file.read_header(path)
    return config, {
        name: safetensors_file.read(path, name, tensor) for name, tensor in header.items()
    }


def read_adapter(
    config: Mapping[str, Any], tensors: Mapping[str, Any], source: str
) -> dict[str, LowRank]:
    """Returns what an adapter adds to each module, by its name in a checkpoint.

    source: what it is called in messages.

    Raises:
      ValueError: a setting or a tensor that is not supported; names it.
    """
    _check_config(config, source)
    parts, names = dict[str, dict[str, np.ndarray]](), dict[tuple[str, str], str]()
    for name, tensor in tensors.items():
        found = PART.fullmatch(name.removeprefix(PREFIX)) if isinstance(name, str) else None
        if found is None or getattr(tensor, "ndim", 0) != 2:
            raise ValueError(
                f"{source} has the tensor {shown(name)}, which is no lora_A or lora_B of a product:"
                " only these are supported, make the adapter without it"
            )
        module, part = found["module"], found["part"]
        check_one(names, (module, part), name, source)
        parts.setdefault(module, {})[part] = read_floats(tensor, source, name)
    if not parts:
        raise ValueError(f"{source} has no lora_A and lora_B: save the adapter again")
    made = {}
    for module, of in parts.items():
        if of.keys() != {"A", "B"}:
            raise ValueError(
                f"{source} has one of lora_A and lora_B alone of {module}: save the adapter again"
            )
        rank, scale = _rank_and_scale(config, module)
        if of["A"].shape[0] != rank:
            raise ValueError(
                f"{source}: lora_A of {module} has {of['A'].shape[0]} rows, the config says "
                f"r={rank}: save the adapter again"
            )
        made[module] = LowRank(of["A"], of["B"] * np.float32(scale))
    return made


def check_one(names: dict[Any, str], weight: Hashable, name: str, source: str) -> None:
    """Notes in `names` which tensor a weight is read from.

    Raises:
      ValueError: another tensor stands for that weight too; names both.
    """
    if (other := names.setdefault(weight, name)) != name:
        raise ValueError(
            f"{source} has the tensors {other!r:.200} and {name!r:.200} for one weight: take one "
            "of them out"
        )


def read_floats(tensor: Any, source: str, name: str) -> np.ndarray:
    """Returns a tensor in float32.

    Raises:
      ValueError: the tensor holds no floats; names it.
    """
    try:
        values = np.asarray(tensor)
        if values.dtype.kind in "fV":  # the latter are bfloat16 and its like
            return values.astype(np.float32)
        kind = str(values.dtype)
    except Exception as error:  # whatever a foreign array may raise
        kind = f"{type(error).__name__}: {error!s:.200}"
    raise ValueError(f"{source} has the tensor {shown(name)}, which holds no floats, got {kind}")


def _rank_and_scale(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Returns the rank of a module's adapter, and what its product is scaled by."""
    rank = _of(config.get("rank_pattern"), module, config["r"])
    alpha = _of(config.get("alpha_pattern"), module, config.get("lora_alpha", 8))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Returns the value of the first pattern that a module's name, or its end, matches."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default


def _check_config(config: Mapping[str, Any], source: str) -> None:
    kind, bias = config.get("peft_type"), config.get("bias", "none")
    if not isinstance(kind, str) or kind != "LORA":
        raise ValueError(f"{source}: peft_type must be 'LORA', got {shown(kind)}")
    if not isinstance(bias, str) or bias != "none":
        raise ValueError(
            f"{source}: bias={shown(bias)} is not supported, only 'none': train without it"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGING_BASE):
        raise ValueError(
            f"{source}: init_lora_weights={shown(start)} changes the base model's weights too: "
            "convert the adapter, with path_initial_model_for_weight_conversion of PEFT's "
            "save_pretrained"
        )
    for name, value in config.items():
        if name not in READ | HARMLESS and not _is_off(value):
            raise ValueError(
                f"{source}: {shown(name)}={shown(value)} is not supported: running without it "
                "would change outputs"
            )
    _check_numbers(config, source)


def _check_numbers(config: Mapping[str, Any], source: str) -> None:
    """Checks ranks, and what scales are made of."""
    if type(config.get("use_rslora", False)) is not bool:
        raise ValueError(f"{source}: use_rslora must be true or false")
    names = ("rank_pattern", "alpha_pattern")
    patterns = {name: {} if _is_off(config.get(name)) else config[name] for name in names}
    for name, given in patterns.items():
        if not isinstance(given, Mapping):
            raise ValueError(f"{source}: {name} must map patterns to numbers, got {shown(given)}")
        for pattern in given:
            if not _is_pattern(pattern):
                raise ValueError(
                    f"{source}: {name} has {shown(pattern)}, which is no pattern of at most "
                    f"{LONGEST} characters, {MOST_REPETITIONS} repetitions and none of a group"
                )
    for rank in (config.get("r"), *patterns["rank_pattern"].values()):
        if type(rank) is not int or not 1 <= rank <= 2**16:
            raise ValueError(f"{source}: r must be a rank of at least 1, got {shown(rank)}")
    for alpha in (config.get("lora_alpha", 8), *patterns["alpha_pattern"].values()):
        if type(alpha) not in (int, float) or not -1e30 < alpha < 1e30:
            raise ValueError(f"{source}: lora_alpha must be a number, got {shown(alpha)}")


def _is_pattern(pattern: Any) -> bool:
    """Whether a pattern of modules is one that ends in time for each."""
    if not isinstance(pattern, str) or len(pattern) > LONGEST or REPEATED_GROUP.search(pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return len(REPETITION.findall(pattern)) <= MOST_REPETITIONS


def _is_off(value: Any) -> bool:
    """Whether a setting says nothing."""
    return value is None or (type(value) in (bool, int, float, str, list, dict) and not value)
