"""Prompts for mixtures, and what these answer: ours and those of transformers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner import SamplingParams
from jaxrunner.ops.backends import dense
from jaxrunner.types import Inputs

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 23, 31, 33, 40, 51, 60)
PROMPTS = [np.random.default_rng(n).integers(1, 62, n).tolist() for n in LENGTHS]
SIZES: dict[str, Any] = dict(
    max_num_batched_tokens=64, max_num_seqs=16, max_model_len=128, block_size=8, num_blocks=400,
    token_buckets=(64,), decode_buckets=(16,), skip_tokenizer_init=True, warm_up=False,
    cache_dir=None,
)  # fmt: skip


def variants():
    """Returns the names of all mixtures."""
    from tests.support import mixtures

    return list(mixtures.VARIANTS)


def greedy(llm, prompts, count):
    """Returns the outputs of an `LLM`, of `count` tokens for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return llm.generate([dict(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)


def tokens(outputs):
    """Returns the tokens of each output."""
    return [list(out.outputs[0].token_ids) for out in outputs]


def logits_of(model, ids):
    """Returns the logits, [T, V], of a module of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(model, config, params, ids):
    """Returns the logits of one sequence, [T, V]."""
    inputs = Inputs(ids, jnp.arange(ids.size), jnp.full(ids.size, ids.size))
    none = (None,) * config.num_hidden_layers
    hidden, _ = model.forward(config, params, none, inputs, dense(1))
    return model.logits(config, params, hidden)
