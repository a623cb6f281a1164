"""Adapters of random values on all products of a model, for figures."""

import numpy as np

from jaxrunner.config import LORA_RANKS
from jaxrunner.llm import LLM
from jaxrunner.lora.lora_request import LoRARequest
from jaxrunner.lora.products import module_shapes


def read(text: str) -> tuple[int, int]:
    """Returns the number and the rank of adapters, of "8x16".

    Raises:
      ValueError: it is no such text.
    """
    num, _, rank = text.partition("x")
    if not (num.isdecimal() and rank.isdecimal() and int(num) and int(rank)):
        raise ValueError(f"--lora must be a number of adapters and their rank, 8x16, got {text!r}")
    return int(num), int(rank)


def sizes(num: int, rank: int) -> dict[str, int | bool]:
    """Returns what an `LLM` is given to hold them."""
    most = next(most for most in LORA_RANKS if most >= rank)
    return dict(enable_lora=True, max_loras=num, max_lora_rank=most)


def add(llm: LLM, num: int, rank: int) -> list[LoRARequest]:
    """Gives an `LLM` so many adapters, of one set of random values."""
    program, rng, tensors = llm.runner.program, np.random.default_rng(0), {}
    for module, (rows, columns) in module_shapes(program.model, program.config).items():
        for part, shape in dict(A=(rank, columns), B=(rows, rank)).items():
            values = rng.random(shape, np.float32) - np.float32(0.5)
            tensors[f"{module}.lora_{part}.weight"] = values * np.float32(0.01)
    config = dict(peft_type="LORA", r=rank, lora_alpha=rank)
    for i in range(1, num + 1):
        llm.add_lora(LoRARequest(f"random {i}", i, lora_tensors=tensors, lora_config=config))
    return [LoRARequest(f"random {i}", i) for i in range(1, num + 1)]
