"""Embeddings and heads that adapters have in place of the model's."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.api.validation import shown
from jaxrunner.loading.peft.adapter import PREFIX, check_one, read_floats
from jaxrunner.lora.module_names import by_names_of_model


def take_saved(
    config: Mapping[str, Any], tensors: Mapping[str, Any], known: Mapping[str, str],
    held: Collection[str], source: str,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:  # fmt: skip
    """Takes out of an adapter the embedding and the head that it has in place of the model's.

    known: names of the model's, by the fields that hold them. held: fields that an engine has room
    for. Returns the config and the tensors without them, and theirs, [V, E], by field.

    Raises:
      ValueError: an engine has no room for one, one is there twice, or one that the config names
        is missing.
    """
    config, rest, found = dict(config), dict[str, Any](), dict[str, np.ndarray]()
    names = dict[str, str]()
    fields = {module: field for field, module in known.items()}
    for name, tensor in tensors.items():
        module = name.removeprefix(PREFIX).removesuffix(".weight") if isinstance(name, str) else ""
        own = next(iter(by_names_of_model({module: 0}, fields)), "")
        if own not in fields:
            rest[name] = tensor
        elif fields[own] in held:
            check_one(names, own, name, source)
            found[fields[own]] = read_floats(tensor, source, name)
        else:
            raise ValueError(
                f"{source} has the tensor {shown(name)}, which stands for the model's own, and the "
                f"engine has no room for it: add {_end(own)!r} to lora_modules_to_save"
            )
    if config.get("ensure_weight_tying") and found.keys() & known.keys() == {"embed"}:
        found |= {"head": found["embed"]} if "head" in held else {}
    named = config.get("modules_to_save")
    ends = {_end(known[field]) for field in found}
    if isinstance(named, Sequence) and not isinstance(named, str):
        lost = {_end(name) for name in known.values()} - ends
        if missing := [name for name in named if _end(name) in lost]:
            raise ValueError(
                f"{source} has no tensor of {missing[0]}, which modules_to_save names: save the "
                "adapter again"
            )
        config["modules_to_save"] = [name for name in named if _end(name) not in ends]
    return config, rest, found


def _end(module: Any) -> str:
    """Returns the last part of a module's name, by which configs have it."""
    return str(module).rsplit(".", 1)[-1]
