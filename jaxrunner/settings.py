"""Reads a checkpoint's `config.json`: every key is used, known to be harmless, or refused."""

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

# Keys that change nothing of the forward pass at inference.
HARMLESS = frozenset(
    """_name_or_path architectures attention_dropout auto_map bos_token_id cache_implementation
    chunk_size_feed_forward dtype embd_pdrop eos_token_id hidden_dropout id2label initializer_range
    is_decoder is_encoder_decoder label2id language layer_norm_eps max_length min_length model_type
    name_or_path output_attentions output_hidden_states pad_token_id problem_type resid_pdrop
    return_dict sep_token_id task_specific_params torch_dtype torchscript transformers_version
    unsloth_fixed unsloth_version use_cache""".split()
)
MISSING = object()


class Settings:
    """The keys of one `config.json`, each to be taken once.

    Raises:
      ValueError: from every method, naming the key, what was wanted and what came.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json"):
        self._values, self._source, self._taken = dict(values), source, set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """Returns the value of `key`; `default` where it is absent or null."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            if default is MISSING:
                raise ValueError(f"{self._source} has no {key!r}: it is needed to build the model")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = kind.__name__ if isinstance(kind, type) else [k.__name__ for k in kind]
            raise ValueError(f"{self._source}: {key!r} must be {names}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON as Python reads it has NaN
            raise ValueError(f"{self._source}: {key!r} must be finite, got {value}")
        return value

    def size(self, key: str, default: Any = MISSING) -> int:
        """Returns the value of `key`, an integer over 0."""
        value = self.take(key, int, default)
        if value < 1:
            raise ValueError(f"{self._source}: {key!r} must be at least 1, got {value}")
        return value

    def expect(self, key: str, *wanted: Any) -> None:
        """Refuses a setting that changes the maths and is not supported."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is not None and value not in wanted:
            raise ValueError(
                f"{self._source}: {key}={value!r} is not supported, only {wanted[0]!r}: "
                "running without it would change the model's outputs"
            )

    def section(self, key: str) -> "Settings | None":
        """Returns a nested group of keys, None where it is absent."""
        value = self.take(key, dict, {})
        return Settings(value, f"{self._source}: {key}") if value else None

    def finish(self) -> None:
        """Refuses keys that nobody took; null, false and empty ones say nothing."""
        left = self._values.keys() - self._taken - HARMLESS
        unknown = sorted(k for k in left if self._values[k] not in (None, False, [], {}))
        if unknown:
            raise ValueError(
                f"{self._source}: unknown setting {unknown[0]}={self._values[unknown[0]]!r}: "
                f"if it does not change the outputs, pass hf_overrides={{{unknown[0]!r}: None}}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      FileNotFoundError, ValueError: the file is missing, broken, or no object; names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a checkpoint folder must hold {path.name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values
