"""Layers behind a pooling that adapters have in place of the model's: `score`, `classifier`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrunner.loading.peft.adapter import PREFIX, read_floats
from jaxrunner.lora.module_names import by_names_of_model
from jaxrunner.lora.saved_layers import LayerWeight

# PEFT names both in `modules_to_save` of any adapter of a classifier, whichever the model has.
NAMED_BY_PEFT = ("classifier", "score")


def take_layers(
    config: Mapping[str, Any], tensors: Mapping[str, Any], known: Sequence[LayerWeight], source: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """Takes out of an adapter the layers that it has in place of the model's.

    known: weights of the model's. Returns the config and the tensors without them, and theirs, by
    path.

    Raises:
      ValueError: a layer lacks one of its weights, or one that the config names is missing.
    """
    config, rest = dict(config), dict(tensors)
    if not known:
        return config, rest, {}
    full = {name.removeprefix(PREFIX): name for name in tensors if isinstance(name, str)}
    own = by_names_of_model(full, [of.name for of in known])
    found = {of.path: read_floats(rest.pop(name), source, name)
             for of in known if (name := own.get(of.name)) is not None}  # fmt: skip
    modules = {_module(of) for of in known if of.path in found}
    for of in known:
        if _module(of) in modules and of.path not in found:
            raise ValueError(
                f"{source} has a {_module(of)} of its own without {of.name}: save the adapter again"
            )
    named = config.get("modules_to_save")
    if isinstance(named, Sequence) and not isinstance(named, str):
        for of in known:
            if of.path not in found and any(_has(name, _module(of)) for name in named):
                raise ValueError(
                    f"{source} has no tensor of {_module(of)}, which modules_to_save names: save "
                    "the adapter again"
                )
        config["modules_to_save"] = [
            name for name in named
            if str(name) not in NAMED_BY_PEFT and not any(_has(name, of) for of in modules)
        ]  # fmt: skip
    return config, rest, found


def _module(of: LayerWeight) -> str:
    return of.name.rpartition(".")[0]


def _has(name: Any, module: str) -> bool:
    """Whether a module is the one that a config names, by its end or in full, or a part of it."""
    return f".{str(name).rpartition('.')[2]}." in f".{module}."
