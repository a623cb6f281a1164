"""Reads a checkpoint's `config.json`: every key is used, known to be harmless, or refused."""

from collections.abc import Mapping
import json
import math
from pathlib import Path
from typing import Any

from jaxrunner.bounds import shown
from jaxrunner.harmless import HARMLESS
from jaxrunner.limits import ANY_SIZE, JSON_BYTES, SIZES, check_bytes

MOST_NAMED = 30  # settings in one message
MISSING = object()


class Settings:
    """The keys of one `config.json`, each to be taken once.

    Raises:
      ValueError: from every method, naming the key, what was wanted and what came.
    """

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", key: str = ""):
        """key: of the group that `values` are, "" for a whole file."""
        self._values, self._key, self._taken = dict(values), key, set()
        self.source = f"{source}: {key}" if key else source

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """Returns the value of `key`; `default` where it is absent or null."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is None:
            if default is MISSING:
                raise ValueError(f"{self.source} has no {key!r}: it is needed to build the model")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = kind.__name__ if isinstance(kind, type) else [k.__name__ for k in kind]
            raise ValueError(f"{self.source}: {key!r} must be {names}, got {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):  # JSON as Python reads it has NaN
            raise ValueError(f"{self.source}: {key!r} must be finite, got {value}")
        return value

    def size(self, key: str, default: Any = MISSING, *, least: int = 1) -> int:
        """Returns the value of `key`, an integer from `least` to what `limits.SIZES` says."""
        value, most = self.take(key, int, default), SIZES.get(key, ANY_SIZE)
        if value < least:
            raise ValueError(f"{self.source}: {key!r} must be at least {least}, got {value}")
        if value > most:
            raise ValueError(f"{self.source}: {key!r} must be at most {most}, got {shown(value)}")
        return value

    def each(self, key: str, kind: type, default: list[Any]) -> list[Any]:
        """Returns the value of `key`, a list of one type of values."""
        values = self.take(key, list, default)
        for i, value in enumerate(values):
            if type(value) is not kind:
                raise ValueError(
                    f"{self.source}: {key}[{i}] must be {kind.__name__}, got {shown(value)}"
                )
        return values

    def expect(self, key: str, *wanted: Any) -> None:
        """Refuses a setting that changes the maths and is not supported."""
        self._taken.add(key)
        value = self._values.get(key)
        if value is not None and value not in wanted:
            raise ValueError(
                f"{self.source}: {key}={shown(value)} is not supported, only {wanted[0]!r}: "
                "running without it would change the model's outputs"
            )

    def section(self, key: str) -> "Settings | None":
        """Returns a nested group of keys, None where it is absent."""
        value = self.take(key, dict, {})
        return Settings(value, self.source, key) if value else None

    def finish(self) -> None:
        """Refuses keys that nobody took; null, false and empty ones say nothing."""
        left = self._values.keys() - self._taken - HARMLESS
        unknown = sorted(k for k in left if self._values[k] not in (None, False, [], {}))
        if unknown:
            named = unknown[:MOST_NAMED]
            pairs = ", ".join(f"{k:.60}={shown(self._values[k])}" for k in named)
            without: dict[str, Any] = dict.fromkeys(named)
            if self._key:
                kept = {k: v for k, v in self._values.items() if k not in unknown}
                without = {self._key: kept}
            raise ValueError(
                f"{self.source}: {len(unknown)} unknown setting{'s' * (len(unknown) > 1)}: "
                f"{pairs}. Where that changes no outputs, pass hf_overrides={without!s:.1500}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      FileNotFoundError, ValueError: the file is missing, too large, broken, or no object; names it.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: a checkpoint folder must hold {path.name}")
    check_bytes(path, JSON_BYTES)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be JSON, got {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values
