"""One of two processes with the stages of a pipeline, as a program.

python -m tests.support.stage_processes RANK PORT CHECKPOINT

CHECKPOINT may be "crowded", for an engine whose requests crowd each other.
"""

from functools import partial
import sys
from typing import Any, cast

import jax

from jaxrunner import LLM
from jaxrunner.engine.engine import Engine
from jaxrunner.models.qwen2 import qwen2
from jaxrunner.parallel.pipeline import deal, homes
from tests.support import crowd, tiny
from tests.support.features import ParityCompiler
from tests.support.processes import SIZES, answers, refused, tokenizer
from tests.support.two_processes import tell

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
    asked = dict(speculative_config=NGRAM), dict(tensor_parallel_size=3)
    told["refused"] += [refused(LLM, checkpoint, **sizes | two | changes) for changes in asked]
    return told


def crowded() -> dict[str, Any]:
    """Returns what requests get that preempt each other, use every rule, and some of which end."""
    config = tiny.config(**crowd.QWEN)
    model, own = deal(qwen2, config, 3)  # two of them in the first process
    params = cast(Any, own).held_part(tiny.random_params(config, seed=5))
    params = jax.tree.map(jax.device_put, params, homes(own))
    sizes = tiny.engine_config(num_blocks=17)
    e = Engine(model, own, sizes, params, make_compiler=ParityCompiler)
    got = crowd.answers(e, 1, aborted={3, 8, 9, 15, 20})
    answers = [(one.finish_reason, one.output_token_ids, crowd.logprobs(one)) for one in got]
    return dict(answers=answers, preemptions=e.scheduler.num_preemptions)


if __name__ == "__main__":
    rank, port, folder = sys.argv[1:]
    tell(int(rank), port, crowded if folder == "crowded" else partial(main, folder))
