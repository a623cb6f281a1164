"""One of two processes with the stages of a pipeline, as a program.

python -m tests.support.stage_processes RANK PORT CHECKPOINT
"""

import json
import os
import sys
from typing import Any

import jax

from jaxrunner import LLM
from tests.support.processes import SIZES, answers, refused, tokenizer

NGRAM = dict(method="ngram", num_speculative_tokens=2)


def main(checkpoint: str) -> dict[str, Any]:
    sizes: dict[str, Any] = SIZES | dict(tokenizer=tokenizer())
    two: dict[str, Any] = dict(pipeline_parallel_size=2, tensor_parallel_size=2)
    with LLM(checkpoint, **sizes, **two) as llm:
        told: dict[str, Any] = dict(tokens=answers(llm))
        llm.sleep(level=1)
        llm.wake_up()
        told["after a sleep"] = answers(llm)
        told["kinds"] = sorted({one.key.name for one in llm.runner.programs.ledger})
        calls = llm.save_state, llm.restore_state, llm.save_params, llm.load_params
        told["refused"] = [refused(call, "none") for call in (*calls, llm.save_sharded_state)]
        told["refused"].append(refused(llm.engine.warm_up, background=True))
    with LLM(checkpoint, **sizes, pipeline_parallel_size=4) as llm:
        told["four stages"] = answers(llm)
    asked = dict(speculative_config=NGRAM), dict(tensor_parallel_size=3)
    told["refused"] += [refused(LLM, checkpoint, **sizes | two | changes) for changes in asked]
    return told


if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    print(json.dumps(main(folder)), flush=True)
    os._exit(0)
