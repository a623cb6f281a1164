"""Adapters in PEFT's file format with random weights, and what merging them makes of a model."""

from collections.abc import Mapping, Sequence
import json
import math
from pathlib import Path
import re
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX, WEIGHT = "base_model.model.", ".weight"


def make(
    base: Mapping[str, np.ndarray], seed: int, *, rank: int = 3, targets: Sequence[str] = ALL,
    **config: Any,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:  # fmt: skip
    """Returns an adapter's tensors and adapter_config.json, and checks nothing."""
    rng = np.random.default_rng(seed)
    told: dict[str, Any] = dict(
        peft_type="LORA", r=rank, lora_alpha=7, target_modules=list(targets), bias="none"
    )
    told |= dict(lora_dropout=0.05, task_type="CAUSAL_LM", inference_mode=True) | config
    tensors = {}
    for name, weight in base.items():
        module = name.removesuffix(WEIGHT)
        if module.split(".")[-1] not in targets:
            continue
        own = pattern(told.get("rank_pattern", {}), module, rank)
        for part, shape in dict(A=(own, weight.shape[1]), B=(weight.shape[0], own)).items():
            values = 0.3 * rng.normal(size=shape)
            tensors[f"{PREFIX}{module}.lora_{part}.weight"] = values.astype(np.float32)
    return tensors, told


def write(folder: Path, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Path:
    """Writes an adapter's folder and returns it."""
    folder.mkdir()
    save_file(dict(tensors), str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merge(
    base: Mapping[str, np.ndarray], tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns a model's tensors in float64 with an adapter merged, by PEFT's definition."""
    merged = {name: tensor.astype(np.float64) for name, tensor in base.items()}
    for name in tensors:
        if ".lora_A." not in name:
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        a, b = (tensors[name.replace("lora_A", f"lora_{x}")].astype(np.float64) for x in "AB")
        rank = pattern(config.get("rank_pattern", {}), module, config["r"])
        alpha = pattern(config.get("alpha_pattern", {}), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        merged[module + WEIGHT] += scale * b @ a
    return merged


def pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns what PEFT's get_pattern_key finds."""
    keys = (k for k in patterns if re.match(rf"(.*\.)?({k})$", module))
    return patterns.get(next(keys, ""), default)


def of_module(
    module: Any, seed: int, *, rank: int = 3, without: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Returns an adapter of all that PEFT's "all-linear" adapts of a module of transformers.

    without: ends of names of products that it leaves out.
    """
    rng, tensors = np.random.default_rng(seed), dict[str, np.ndarray]()
    for name, part in linears(module).items():
        if name.endswith(without):
            continue
        outputs, inputs = _sizes(part)
        for letter, shape in dict(A=(rank, inputs), B=(outputs, rank)).items():
            values = 0.15 * rng.normal(size=shape)
            tensors[f"{PREFIX}{name}.lora_{letter}.weight"] = values.astype(np.float32)
    return tensors


def linears(module: Any) -> dict[str, Any]:
    """Returns the products of a module of transformers, by name, that "all-linear" adapts."""
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = torch.nn.Linear, Conv1D
    found = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds))
    head = module.get_output_embeddings()
    return {name: part for name, part in found if part is not head}


def merge_into(module: Any, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
    """Merges an adapter into a module of transformers, by PEFT's definition."""
    import torch

    for name, part in linears(module).items():
        if (a := tensors.get(f"{PREFIX}{name}.lora_A.weight")) is None:
            continue
        more = tensors[f"{PREFIX}{name}.lora_B.weight"].astype(np.float64) @ a
        more *= config["lora_alpha"] / config["r"]
        more = more if isinstance(part, torch.nn.Linear) else more.T
        part.weight.data += torch.tensor(more, dtype=part.weight.dtype)


def _sizes(part: Any) -> tuple[int, int]:
    """Returns the outputs and inputs of a product; a `Conv1D` holds them the other way round."""
    rows, columns = part.weight.shape
    return (rows, columns) if hasattr(part, "in_features") else (columns, rows)
