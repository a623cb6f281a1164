"""One of several processes with a mesh over the devices of all, as a program.

python -m tests.support.processes RANK PORT CHECKPOINT FOLDER [RANK_THAT_DIES]

FOLDER is where state is saved, or "ranks" for a mixture over data ranks.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
import itertools
import os
from pathlib import Path
import sys
import time
from typing import Any

import jax
import numpy as np
import tokenizers

from jaxrunner import LLM, RequestOutput, SamplingParams
from jaxrunner.api.sampling_params import RequestOutputKind, StructuredOutputsParams
from jaxrunner.loading import orbax_io
from jaxrunner.parallel.processes import host_copy, together
from jaxrunner.text.tokenizer import Tokenizer
from tests.support.two_processes import tell

NUM_DEVICES = 4  # of both processes
HEARTBEAT_S = 10  # without any of a process it is taken for dead
SIZES: dict[str, Any] = dict(
    max_num_seqs=3, max_num_batched_tokens=32, token_buckets=(32,), decode_buckets=(3,),
    max_model_len=48, num_blocks=24, block_size=4, dtype="float32", warm_up=False, use_tqdm=False,
    cache_dir=None,
)  # fmt: skip
MIXTURE: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"], num_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=12, vocab_size=64, num_hidden_layers=1, eos_token_id=63,
)  # fmt: skip
GREEDY, USUAL = SamplingParams(temperature=0), SamplingParams(seed=4, max_tokens=6)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [9, 2], [7] * 9, [8, 2, 8], [1, 2, 3, 4], [5, 5], [6], [2] * 5]
RULES: list[dict[str, Any]] = [
    dict(temperature=0, max_tokens=6),
    dict(temperature=0.9, seed=4, max_tokens=6, top_k=9),
    dict(temperature=0.8, seed=7, max_tokens=5, logprobs=2, prompt_logprobs=1),
    dict(temperature=0.7, seed=9, max_tokens=6, ignore_eos=True),
    dict(  # with logprobs, so that a step of it runs the same program as one of the third
        temperature=0, max_tokens=6, structured_outputs=StructuredOutputsParams(choice=["ABBA"]),
        logprobs=2,
    ),
]  # fmt: skip


def rules() -> list[SamplingParams]:
    return [SamplingParams(**RULES[i % len(RULES)]) for i in range(len(PROMPTS))]


def answers(llm: LLM, asked: SamplingParams | list[SamplingParams] | None = None):
    """Returns the tokens of each of `PROMPTS`, with `rules()` where nothing else is asked."""
    prompts = [dict(prompt_token_ids=ids) for ids in PROMPTS]
    outputs = llm.generate(prompts, asked or rules(), on_error="raise", use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def saved(llm: LLM, folder: Path) -> list[list[int]]:
    """Saves weights in both ways and the requests in the midst. Returns the tokens that follow what
    is restored."""
    params = jax.tree.map(lambda x: np.asarray(host_copy(x)), llm.params)
    llm.save_params(folder / "params")
    llm.save_sharded_state(folder / "shards", max_size=9000)
    llm.reload_weights([("model.norm.weight", np.zeros(llm.model_config.dims["E"], np.float32))])
    llm.load_params(folder / "params")
    for ours, theirs in zip(*map(jax.tree.leaves, (llm.params, params)), strict=True):
        np.testing.assert_array_equal(host_copy(ours), theirs)
    return resumed(llm, folder / "state")


def resumed(llm: LLM, folder: Path) -> list[list[int]]:
    """Saves requests in the midst. Returns all tokens of each, the last ones restored."""
    so_far = [replace(one, output_kind=RequestOutputKind.CUMULATIVE) for one in rules()]
    told = llm.stream([dict(prompt_token_ids=ids) for ids in PROMPTS], so_far)
    first = last_of(itertools.islice(told, 7))
    llm.save_state(folder)
    del told  # which aborts the requests
    both = first | last_of(llm.restore_state(folder))
    return [both[i] for i in range(len(PROMPTS))]


def last_of(told: Iterable[RequestOutput]) -> dict[int, list[int]]:
    """Returns the tokens of each request that is told of, by the place of its prompt."""
    return {int(one.request_id) % len(PROMPTS): one.outputs[0].token_ids for one in told}


def one_fails(error: type[Exception]) -> Callable[[], None]:
    """Returns what fails in the second process alone."""

    def run() -> None:
        if jax.process_index() == 1:
            raise error("no disk")

    return run


def main(checkpoint: str, saved_in: str) -> dict[str, Any]:
    sizes: dict[str, Any] = SIZES | dict(tensor_parallel_size=NUM_DEVICES, tokenizer=tokenizer())
    told: dict[str, Any] = {}
    with LLM(checkpoint, **sizes) as llm:
        told["tokens"] = answers(llm)
        llm.sleep(level=1)
        llm.wake_up()
        told["after a sleep"] = answers(llm)
        llm.reload_weights()
        told["reloaded"] = answers(llm)
        told["report"] = llm.report()
        told["saved"] = saved(llm, Path(saved_in))
        told["refused"] = [refused(llm.engine.warm_up, background=True)]
        own = Path(saved_in, f"own{jax.process_index()}")  # of no concern to others
        told["refused"].append(refused(orbax_io.save, own, dict(x=np.arange(3))))
        told["together"] = [refused(together, llm.engine.runner.program.mesh, one_fails(error))
                            for error in (FileNotFoundError, KeyError)]  # fmt: skip
    drafts: dict[str, Any] = dict(method="draft_model", model=checkpoint)
    auto = drafts | dict(num_speculative_tokens="auto")
    told["refused"].append(refused(LLM, checkpoint, **sizes, speculative_config=auto))
    drafts |= dict(num_speculative_tokens=2)
    others: dict[str, Any] = dict(decode_context_parallel_size=2, num_decode_steps=2)
    with LLM(checkpoint, **sizes, **others, speculative_config=drafts) as llm:
        told["with drafts, steps, context"] = answers(llm)
    told["refused"].append(refused(LLM, checkpoint, **sizes | dict(tensor_parallel_size=3)))
    return told


def of_ranks(checkpoint: str) -> dict[str, Any]:
    """Returns the tokens of a mixture whose data ranks lie in several processes, also of requests
    that were saved."""
    sizes: dict[str, Any] = SIZES | dict(tokenizer=tokenizer(), enable_expert_parallel=True)
    with LLM(checkpoint, **sizes, data_parallel_size=NUM_DEVICES) as llm:
        told = dict(tokens=answers(llm, USUAL), report=llm.report())
        llm.sleep(level=1)
        llm.wake_up()
        told["saved"] = resumed(llm, Path(checkpoint, "state"))
        return told | {"after a sleep": answers(llm, USUAL)}


def tokenizer() -> Tokenizer:
    """Returns one whose tokens are 64 characters from "!" on, as bytes."""
    vocab = {chr(ord("!") + i): i for i in range(64)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(inner)


def dying(checkpoint: str, is_it: bool) -> dict[str, Any]:
    """Ends one of the processes between two requests; the others go on, and tell what came of it.

    Without JAX's recoverability these end too.
    """
    sizes: dict[str, Any] = SIZES | dict(tensor_parallel_size=NUM_DEVICES, tokenizer=tokenizer())
    sizes |= dict(step_timeout_s=15.0)  # a sum may wait for the one that is gone, or fail
    with LLM(checkpoint, **sizes) as llm:
        answers(llm, GREEDY)
        if is_it:
            os._exit(1)
        many = [dict(prompt_token_ids=ids) for ids in PROMPTS]  # more than run at a time
        outputs = llm.generate(many, GREEDY, use_tqdm=False)
        told: dict[str, Any] = dict(errors=[output.error for output in outputs])
        time.sleep(1.2 * HEARTBEAT_S)
        told["later"] = refused(llm.generate, many)
    return told


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    rank, port, checkpoint, folder, *dies = sys.argv[1:]
    run = partial(of_ranks, checkpoint) if folder == "ranks" else partial(main, checkpoint, folder)
    if dies:
        run = partial(dying, checkpoint, rank in dies)
    tell(int(rank), port, run, heartbeat_timeout_seconds=HEARTBEAT_S)
