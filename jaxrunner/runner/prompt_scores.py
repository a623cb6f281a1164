"""Launches the programs that compute prompt logprobs of a step."""

from typing import Any

import jax
import numpy as np

from jaxrunner.device.packing import Layout
from jaxrunner.program.program import Program
from jaxrunner.program.shapes import prompt_logprobs_size, prompt_logprobs_spec
from jaxrunner.programs.program_table import Key, ProgramTable
from jaxrunner.ranks.outputs import scores_layout
from jaxrunner.runner.step_handle import Work


def launch_scores(
    program: Program, programs: ProgramTable, params: Any, tables: Any,
    hidden: jax.Array, targets: Any, work: Work,
) -> list[tuple[Layout, Any]]:  # fmt: skip
    """Computes logprobs of the prompt tokens in `targets` from hidden, [T, E], in several launches.

    tables: the state without its KV caches. Returns packed outputs with their layouts.
    """
    lora = work.bucket.lora and bool(program.saved)
    size = prompt_logprobs_size(work.bucket.num_tokens, work.target_columns, lora=lora)
    scores = []
    for first in range(0, work.num_targets, size.num_targets):
        run = programs[Key("prompt_logprobs", size)]
        packed = run(params, tables, hidden, targets, np.int32(first))
        if size.num_logprobs == program.config.vocab_size:
            packed = np.asarray(packed)  # waits, as those of many tokens would fill the device
        scores.append((scores_layout(program, prompt_logprobs_spec(program, size)), packed))
    return scores
