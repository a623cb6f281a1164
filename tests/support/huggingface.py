"""The independent reference: transformers with PyTorch on the CPU, in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.support import families


def model(variant: str):
    """Returns the Hugging Face model of a variant, with our weights."""
    family = families.VARIANTS[variant][0].replace("MiMo", "Qwen2")  # but for layers that draft
    values = {k: v for k, v in families.settings(variant).items() if k != "architectures"}
    values |= dict(bos_token_id=None, eos_token_id=None)
    config = getattr(transformers, f"{family}Config")(**values)
    torch_model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in torch_model.named_parameters():
            parameter.copy_(torch.tensor(families.weight(name, tuple(parameter.shape))))
    return torch_model


def logits(torch_model, ids) -> np.ndarray:
    """Returns the logits of every position of one sequence, [T, V]."""
    with torch.no_grad():
        return torch_model(torch.tensor([ids])).logits[0].numpy()


def save(variant: str, folder: Path) -> Any:
    """Writes a variant's checkpoint. Returns its module."""
    made = model(variant)
    made.save_pretrained(folder)
    settings = families.settings(variant) | dict(model_type=made.config.model_type)
    (folder / "config.json").write_text(json.dumps(settings))
    return made
