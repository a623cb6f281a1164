"""One of several processes with a mesh over the devices of all, as a program.

python -m tests.support.processes RANK PROCESSES PORT DEVICES CHECKPOINT [RANK_THAT_DIES]
"""

import json
import os
import sys
import time
from typing import Any

import jax
import tokenizers

from jaxrunner import LLM, SamplingParams
from jaxrunner.api.sampling_params import StructuredOutputsParams
from jaxrunner.text.tokenizer import Tokenizer

HEARTBEAT_S = 10  # without any of a process it is taken for dead
SIZES: dict[str, Any] = dict(
    max_num_seqs=3, max_num_batched_tokens=32, token_buckets=(32,), decode_buckets=(3,),
    max_model_len=48, num_blocks=24, block_size=4, dtype="float32", warm_up=False, use_tqdm=False,
    cache_dir=None,
)  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2], [7] * 9, [8, 2, 8], [1, 2, 3, 4], [5, 5], [6], [2] * 5]
RULES: list[dict[str, Any]] = [
    dict(temperature=0, max_tokens=6),
    dict(temperature=0.9, seed=4, max_tokens=6, top_k=9),
    dict(temperature=0.8, seed=7, max_tokens=5, logprobs=2, prompt_logprobs=1),
    dict(temperature=0.7, seed=9, max_tokens=6, ignore_eos=True),
    dict(temperature=0, max_tokens=6, structured_outputs=StructuredOutputsParams(choice=["ABBA"])),
]


def answers(llm: LLM) -> list[list[int]]:
    prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    params = [SamplingParams(**RULES[i % len(RULES)]) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params, on_error="raise", use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def main(checkpoint: str, num_devices: int) -> dict[str, Any]:
    sizes: dict[str, Any] = SIZES | dict(tensor_parallel_size=num_devices, tokenizer=tokenizer())
    told: dict[str, Any] = {}
    with LLM(checkpoint, **sizes) as llm:
        told["tokens"] = answers(llm)
        llm.sleep(level=1)
        llm.wake_up()
        told["after a sleep"] = answers(llm)
        llm.reload_weights()
        told["reloaded"] = answers(llm)
        told["report"] = llm.report()
        told["refused"] = []
        for call in (llm.save_params, llm.load_params, llm.save_sharded_state, llm.save_state,
                     llm.restore_state):  # fmt: skip
            told["refused"].append(refused(call, f"{checkpoint}/none"))
        told["refused"].append(refused(llm.engine.warm_up, background=True))
    drafts = dict(method="draft_model", model=checkpoint, num_speculative_tokens="auto")
    told["refused"].append(refused(LLM, checkpoint, **sizes, speculative_config=drafts))
    told["refused"].append(refused(LLM, checkpoint, **sizes | dict(tensor_parallel_size=3)))
    return told


def tokenizer() -> Tokenizer:
    """Returns one whose tokens are 64 characters from "!" on, as bytes."""
    vocab = {chr(ord("!") + i): i for i in range(64)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(inner)


def dying(checkpoint: str, num_devices: int, is_it: bool) -> dict[str, Any]:
    """Ends one of the processes between two requests; the others go on, and tell what came of it.

    Without JAX's recoverability these end too.
    """
    sizes: dict[str, Any] = SIZES | dict(tensor_parallel_size=num_devices, tokenizer=tokenizer())
    with LLM(checkpoint, **sizes) as llm:
        answers(llm)
        if is_it:
            os._exit(1)
        many = [dict(prompt_token_ids=ids) for ids in PROMPTS]  # more than run at a time
        outputs = llm.generate(many, SamplingParams(temperature=0), use_tqdm=False)
        told: dict[str, Any] = dict(errors=[output.error for output in outputs])
        time.sleep(2 * HEARTBEAT_S)
        told["later"] = refused(llm.generate, many)
    return told


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    rank, num_processes, port, num_devices = map(int, sys.argv[1:5])
    jax.config.update("jax_num_cpu_devices", num_devices // num_processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes, rank, heartbeat_timeout_seconds=HEARTBEAT_S
    )
    if len(sys.argv) > 6:
        told = dying(sys.argv[5], num_devices, rank == int(sys.argv[6]))
        print(json.dumps(told), flush=True)
        os._exit(0)  # JAX waits at its end for the process that is gone
    print(json.dumps(main(sys.argv[5], num_devices)), flush=True)
