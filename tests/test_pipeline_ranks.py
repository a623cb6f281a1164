"""Ranks of a pipeline, a `Worker` each, driven by a scheduler of one's own."""

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrunner import LoRARequest, SamplingParams
from jaxrunner.loading.weights import save_checkpoint
from jaxrunner.models.qwen2 import qwen2
from jaxrunner.runner.step_handle import ModelRunnerOutput
from jaxrunner.worker.worker import Worker
from tests.support import lora, tiny
from tests.support.checkpoints import split

EMBED = "model.embed_tokens.weight"
QWEN: dict[str, Any] = dict(
    architectures=["Qwen2ForCausalLM"], num_hidden_layers=3, tie_word_embeddings=True
)  # fmt: skip
SIZES: dict[str, Any] = dict(
    max_num_seqs=4, max_num_batched_tokens=64, token_buckets=(64,), decode_buckets=(4,),
    max_model_len=128, dtype="float32",
)  # fmt: skip
STEPS = (
    (dict(a=5, b=40), "ab"), (dict(a=1, b=47), ""), (dict(a=1), ""), (dict(a=1, b=1), ""),
    (dict(a=1, b=1), ""), (dict(b=1, c=3), "c"), ({}, ""), (dict(c=1), ""),
)  # fmt: skip


def steps():
    """Yields steps of a scheduler of one's own: chunks, a slot that is free and taken at once."""
    asked = SamplingParams(temperature=0.7)
    new = dict(
        a=tiny.new_request("a", [5, 6, 7, 8, 9], blocks=[0, 1], params=asked),
        b=tiny.new_request("b", [i % 60 for i in range(87)], blocks=[2, 3]),
        c=tiny.new_request("c", [5, 6, 7], blocks=[4]),
    )
    new["b"].lora_id = 1
    for i, (counts, names) in enumerate(STEPS):
        gone = {5: {"a"}, 6: {"b"}}.get(i, set())
        yield tiny.scheduled(counts, [new[name] for name in names], finished_req_ids=gone)


def workers(folder: Path, num: int, **sizes: Any) -> list[Worker]:
    """Returns the ranks of a pipeline, each on a device of its own, or one worker of all."""
    made = []
    for rank in range(num):
        own: dict[str, Any] = {}
        if num > 1:
            devices = jax.devices()[rank:][:1]
            own = dict(pipeline_parallel_size=num, rank=rank, devices=devices)
        worker = Worker(folder, **own, **sizes)
        worker.init_device()
        worker.load_model()
        worker.initialize_from_config(16)
        made.append(worker)
    return made


@pytest.mark.slow
@pytest.mark.devices(3)
def test_ranks_hand_each_other_a_step_and_its_tokens(tmp_path):
    folder, config = tmp_path / "checkpoint", tiny.config(**QWEN)
    params = tiny.random_params(config, seed=5)
    save_checkpoint(folder, qwen2, config, params, tiny.SETTINGS | QWEN)
    sizes = SIZES | dict(enable_lora=True, max_lora_rank=8, lora_modules_to_save=["embed_tokens"])
    tensors, told = lora.make(small := split(qwen2, config, params), 1, rank=8)
    tensors[f"{lora.PREFIX}{EMBED}"] = -small[EMBED]
    adapter = LoRARequest("b", 1, lora_tensors=tensors, lora_config=told)
    ranks, (whole,) = workers(folder, 3, **sizes), workers(folder, 1, **sizes)
    for worker in (*ranks, whole):
        worker.add_lora(adapter)
    *others, last = ranks
    got = None
    for output in steps():
        x = None
        for worker in ranks:
            x = worker.execute_model(output, x)
        got = last.sample_tokens().get()
        for worker in others:
            worker.receive_tokens(got)
        whole.execute_model(output)
        assert got.sampled_token_ids == whole.sample_tokens().get().sampled_token_ids
    layers = [name for worker in ranks for name in worker.get_kv_cache_spec()]
    assert layers == [*whole.get_kv_cache_spec()]
    held = [len(jax.tree.leaves(worker.params)) for worker in (*ranks, whole)]
    embeddings, norms = 1, 2  # more than once: the tied embedding, and the last norm
    assert sum(held[:3]) == held[3] + embeddings + norms and max(held[:3]) < held[3] / 2
    more = tiny.scheduled(dict(c=1))
    with pytest.raises(ValueError, match="intermediate_tensors: rank=1 wants what rank 0 returned"):
        ranks[1].execute_model(more)
    x = ranks[0].execute_model(more)
    with pytest.raises(ValueError, match="rank=0 wants none of this step, got some: hand each"):
        ranks[0].execute_model(more, x)
    with pytest.raises(RuntimeError, match="a request of this step awaits a token of an earlier"):
        ranks[0].execute_model(more)
    with pytest.raises(RuntimeError, match="no step awaits tokens: call execute_model first"):
        ranks[1].receive_tokens(got or ModelRunnerOutput())
    for worker in (*ranks, whole):
        worker.shutdown()
