"""The independent reference: transformers with PyTorch on the CPU, in float32."""

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


def greedy(torch_model, ids, count: int) -> list[int]:
    """Returns what `generate` appends to a prompt, one sequence at a time."""
    reset_rope(torch_model)
    mask = torch.ones(1, len(ids), dtype=torch.long)
    out = torch_model.generate(
        torch.tensor([ids]), attention_mask=mask, max_new_tokens=count, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()


def reset_rope(torch_model) -> None:
    """Forgets the longest sequence seen: dynamic scaling would carry it to the next one."""
    rotary = torch_model.model.rotary_emb
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq = rotary.original_inv_freq
