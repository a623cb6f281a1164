"""Every decoder of the registry and its variants: a tiny checkpoint of each, and its reference."""

from collections.abc import Callable, Iterator
import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support import dense_families, families, hybrids, mixtures
from tests.support.checkpoints import NEEDS_TORCH


class Case(NamedTuple):
    """A variant of a family."""

    architecture: str
    save: Callable[[Path], Any]  # writes a checkpoint, returns its module of transformers
    has_states: bool = False


def _cases() -> Iterator[tuple[str, Case]]:
    for name, (family, _) in families.VARIANTS.items():
        yield name, Case(f"{family}ForCausalLM", functools.partial(_save_plain, name))
    for name, (family, _) in dense_families.VARIANTS.items():
        save = functools.partial(dense_families.save, name)
        yield name, Case(dense_families.class_of(family), save)
    for name, (family, _) in mixtures.VARIANTS.items():
        yield (
            f"{name}, a mixture",
            Case(f"{family}ForCausalLM", functools.partial(mixtures.save, name)),
        )
    tower = "llama 4, a mixture, beside a tower"
    yield tower, Case("Llama4ForConditionalGeneration", mixtures.save_beside_tower)
    for name, (family, _) in hybrids.VARIANTS.items():
        yield name, Case(f"{family}ForCausalLM", functools.partial(hybrids.save, name), True)
    for family, name in hybrids.BESIDE_TOWERS.items():
        save = functools.partial(hybrids.save_beside_tower, family, name)
        yield f"{name}, beside a tower", Case(f"{family}ForConditionalGeneration", save, True)


def _save_plain(variant: str, folder: Path) -> Any:
    pytest.importorskip("torch", reason=NEEDS_TORCH)
    from tests.support import huggingface

    return huggingface.save(variant, folder)


CASES = dict(_cases())
# Those that differ from others of their family in sizes, weights, norms or angles alone: their
# tokens show these, without prefixes and chunks.
ALIKE = (
    "llama, tied",
    "llama, biases",
    "llama, all heads have a key",
    "llama, one key",
    "llama, derived head size",
    "llama, llama3 rope",
    "llama, linear rope",
    "llama, yarn",
    "mistral, no window",
    "qwen3, tied",
    "gemma 3, scaled, capped logits",
    "exaone 4, no window",
    "olmo 2, one key",
    "neox, one after the other",
    "mistral small 3.1",
    "olmoe, one key, a mixture",
    "glm4, biases, all experts, a mixture",
    "deepseek v2 lite, a mixture",
    "deepseek v3, halves, a mixture",
    "gpt-oss, one key, a mixture",
    "lfm 2, biases, wide",
    "granite 4, dense, rotated",
    "falcon h1, normed",
    "falcon h1, normed before, biases",
    "qwen 3 next, dense layers, biases",
)


def logits(module: Any, texts: list[list[int]], prompt_lens: list[int]) -> list[np.ndarray]:
    """Returns the logits of every position of texts, [T, V] each, by one call, in float64.

    module: computes in its own dtype. prompt_lens: how many tokens of each text are its prompt.
    """
    import torch

    if any(map(hybrids.is_ungrouped, module.modules())):
        pytest.skip("this transformers norms all groups of Mamba-2 together: it wants a newer one")
    for part in module.modules():
        if getattr(part, "rope_type", None) in ("dynamic", "longrope"):
            part.forward = _turn_as_generated(part, prompt_lens)
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])  # unseen padding
    with torch.no_grad():
        found = module(ids, use_cache=False).logits.double().numpy()
    return [found[i, : len(text)] for i, text in enumerate(texts)]


def _turn_as_generated(rotary: Any, prompt_lens: list[int]) -> Callable[..., Any]:
    """Returns a `forward` of angles that depend on the length, as a KV cache has keys turned.

    The tokens of a prompt are turned by its length, and each later one by the length up to it.
    """
    import torch

    own = type(rotary).forward.__get__(rotary)

    def forward(x: Any, position_ids: Any) -> tuple[Any, ...]:
        rows, positions = [], position_ids[0]
        for prompt_len in prompt_lens:
            own(x, positions[None, :1])  # forgets the length of the row before
            parts = positions[:prompt_len], *positions[prompt_len:].split(1)
            rows.append([own(x, part[None]) for part in parts])
        pairs = [[torch.cat(parts, 1) for parts in zip(*row, strict=True)] for row in rows]
        return tuple(torch.cat(parts) for parts in zip(*pairs, strict=True))

    return forward
