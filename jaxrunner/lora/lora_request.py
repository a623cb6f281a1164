"""The adapter that a request wants, as vLLM's `LoRARequest` says it. Knows no JAX."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrunner.api.validation import Bound, shown, validate

_NAME, _ID = Bound(str), Bound(int, 1, 2**31 - 1)
_PATH = Bound(str, optional=True, also=(Path,))


@dataclass(frozen=True)
class LoRARequest:
    """An adapter: its name, its id, by which it is known, and where its weights are.

    lora_path: a folder with adapter_config.json and adapter_model.safetensors, as PEFT writes it;
        None for an adapter that was added before.
    lora_tensors, lora_config: in place of a folder, arrays by PEFT's names of tensors, and what
        adapter_config.json would hold.

    Raises:
      TypeError, ValueError: a field that cannot be; names it.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | Path | None = None
    lora_tensors: Mapping[str, Any] | None = None
    lora_config: Mapping[str, Any] | None = None

    def __post_init__(self):
        if not validate("lora_name", self.lora_name, _NAME):
            raise ValueError("lora_name must be a text of some characters, got '': give it one")
        validate("lora_int_id", self.lora_int_id, _ID)
        validate("lora_path", self.lora_path, _PATH)
        for name in ("lora_tensors", "lora_config"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(f"{name} must be a mapping or None, got {shown(value)}")
        if (self.lora_tensors is None) != (self.lora_config is None):
            raise ValueError("lora_tensors and lora_config belong together: give both or none")
        if self.lora_tensors is not None and self.lora_path is not None:
            raise ValueError("lora_path and lora_tensors each say the weights: give one")

    @property
    def has_weights(self) -> bool:
        """Whether it says where its weights are."""
        return self.lora_path is not None or self.lora_tensors is not None


def check_lora_request(value: Any) -> LoRARequest | None:
    """Returns a `LoRARequest`, or None.

    Raises:
      TypeError: it is neither.
    """
    if value is None or isinstance(value, LoRARequest):
        return value
    raise TypeError(f"lora_request must be a LoRARequest or None, got {shown(value)}: make one")
