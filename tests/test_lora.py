"""Adapters of requests: tokens and logits are those of models that these are merged into."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxrunner import LoRARequest
from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.beam import BeamSearchParams
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.models.llama import llama
from jaxrunner.worker.worker import Worker
from tests.outside import checkpoint, float64_llama
from tests.support import features, lora, tiny

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
KINDS: dict[str, dict[str, Any]] = {
    "all": dict(rank=3),
    "attention": dict(rank=8, targets=("q_proj", "v_proj")),
    "mlp of one rank": dict(rank=1, targets=("up_proj", "down_proj"), use_rslora=True),
    "patterns": dict(
        rank=4, targets=lora.ALL, use_rslora=True,
        rank_pattern={"k_proj": 2, r"layers\.1\.mlp\.gate_proj": 5},
        alpha_pattern={"down_proj": 3, "q_proj": 11},
    ),
}  # fmt: skip
PROMPTS = checkpoint.prompts(5, 11, 3, 7, 9)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of a checkpoint with adapters in it, its tensors, and requests with the tokens that
    float64 gives of the merged models; the last one has no adapter."""
    folder = tmp_path_factory.mktemp("lora")
    base = checkpoint.write(folder, llama, SETTINGS)
    requests, want = [], []
    for i, (name, kind) in enumerate(KINDS.items(), 1):
        made = lora.make(base, i, **kind)
        requests.append(LoRARequest(name, i, lora.write(folder / name, *made)))
        want.append(tokens(lora.merge(base, *made), PROMPTS[i - 1]))
    return folder, base, [*requests, None], [*want, tokens(base, PROMPTS[-1])]


def tokens(tensors, prompt, count=9):
    of = functools.partial(float64_llama.logits, tensors, SETTINGS)
    return float64_llama.greedy(of, prompt, count)


@pytest.fixture(scope="module")
def llm(saved):
    sizes = dict(enable_lora=True, max_loras=3, max_lora_rank=8, max_num_seqs=3)
    with checkpoint.start(saved[0], **sizes, logprobs_mode="raw_logits") as llm:
        yield llm


def answers(llm, prompts, adapters, count=9):
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, checkpoint.greedy(count), lora_request=adapters, use_tqdm=False)
    assert not [o.error for o in outputs if o.error]
    return [list(output.outputs[0].token_ids) for output in outputs]


def beams(llm, prompts, adapters):
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    found = llm.beam_search(prompts, params, lora_request=adapters, use_tqdm=False)
    return [[sequence.tokens for sequence in one.sequences] for one in found]


def test_tokens_of_a_mixed_batch_are_those_of_merged_models(llm, saved):
    _, _, requests, want = saved
    assert len({tuple(one) for one in want}) == len(want)
    assert answers(llm, PROMPTS, requests) == want
    for prompt, request, one in zip(PROMPTS, requests, want, strict=True):
        assert answers(llm, [prompt], request) == [one]


def test_logits_are_those_of_merged_models(llm, saved):
    _, base, requests, _ = saved
    params = checkpoint.greedy(1, logprobs=-1)
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS]
    outputs = llm.generate(asked, params, lora_request=requests, use_tqdm=False)
    for prompt, output, request, kind in zip(
        PROMPTS, outputs, requests, [*KINDS.values(), None], strict=True
    ):
        tensors = base
        if kind is not None:
            tensors = lora.merge(base, *lora.make(base, request.lora_int_id, **kind))
        entry = output.outputs[0].logprobs[0]
        got = np.array([entry[t].logprob for t in range(SETTINGS["vocab_size"])])
        wanted = float64_llama.logits(tensors, SETTINGS, prompt)[-1]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_adapters_come_and_go_while_requests_run(saved, tmp_path):
    """One place: all are brought there in turn, and the state goes on in another engine."""
    folder, base, requests, want = saved
    sizes = dict(enable_lora=True, max_loras=2, max_lora_rank=8, num_decode_steps=2, num_blocks=24)

    with checkpoint.start(folder, **sizes, warm_up=True) as llm:
        llm.engine.runner.programs.strict = True  # nothing is compiled any more
        engine = llm.engine
        found: dict[str, list[int]] = {}
        for i, prompt in enumerate(PROMPTS * 2):
            engine.add(f"{i}", prompt, checkpoint.greedy(9), lora_request=requests[i % 5])
        for turn in range(200):
            for request, new in engine.step():
                found.setdefault(request.request_id, []).extend(new)
            running = {r.lora_id for r in engine.scheduler.running if r.lora_id}
            assert len(running) <= 2
            if turn == 3:  # a newcomer, and one that leaves again
                made = lora.make(base, 9, rank=2)
                more = LoRARequest("more", 9, lora_tensors=made[0], lora_config=made[1])
                assert llm.add_lora(more) and not llm.add_lora(more)
                engine.add("more", PROMPTS[0], checkpoint.greedy(9), lora_request=more)
                with pytest.raises(RuntimeError, match="requests have adapter 9: abort them"):
                    llm.remove_lora(9)
            if turn == 4:
                save_engine(engine, tmp_path / "saved")
                break
        assert engine.has_unfinished
    with checkpoint.start(folder, **sizes) as llm:
        tensors, config = lora.make(base, 9, rank=2)
        more = LoRARequest("more", 9, lora_tensors=tensors, lora_config=config)
        for request in [*requests[:-1], more]:
            llm.add_lora(request)
        restore_engine(llm.engine, tmp_path / "saved")
        while llm.engine.has_unfinished:
            for request, _ in llm.engine.step():
                found[request.request_id] = list(request.output_token_ids)
        merged = tokens(lora.merge(base, tensors, config), PROMPTS[0])
        assert [found[f"{i}"] for i in range(10)] == want * 2 and found["more"] == merged
        assert llm.list_loras() == {1, 2, 3, 4, 9} and llm.remove_lora(9)
        assert not llm.remove_lora(9)


def test_prefixes_are_of_one_adapter_and_of_its_last_version(llm, saved):
    _, base, requests, _ = saved
    [prompt] = checkpoint.prompts(17, seed=5)

    def cached(request):
        asked = {"prompt_token_ids": prompt}
        [output] = llm.generate(
            asked, checkpoint.greedy(5), lora_request=request, use_tqdm=False, on_error="raise"
        )
        return output.num_cached_tokens, list(output.outputs[0].token_ids)

    for seed in (21, 22):  # the second one takes the place of the first, as a trainer's would
        tensors, config = lora.make(base, seed, rank=6)
        trained = LoRARequest("trained", 7, lora_tensors=tensors, lora_config=config)
        llm.add_lora(trained)
        want = tokens(lora.merge(base, tensors, config), prompt, 5)
        assert cached(trained) == (0, want)
        assert cached(LoRARequest("trained", 7)) == (16, want)
    want = tokens(base, prompt, 5)
    assert cached(None) == (0, want) and cached(None) == (16, want)
    assert cached(requests[0])[0] == 0 and llm.remove_lora(7)


def test_a_refused_request_loads_no_adapter(llm, saved):
    _, _, requests, _ = saved
    ruled = SamplingParams(max_tokens=4, structured_outputs=features.GRAMMAR)
    loaded = llm.list_loras()
    more = LoRARequest("refused", 77, requests[0].lora_path)
    with pytest.raises(ValueError, match="structured_outputs needs the tokenizer"):
        llm.engine.add("refused", [1, 2, 3], ruled, lora_request=more)
    assert llm.list_loras() == loaded and not llm.engine.has_unfinished


def test_an_adapter_is_merged_and_the_weights_come_back_to_the_bit(llm, saved):
    _, base, requests, _ = saved
    llm.add_lora(requests[3])
    before = [np.asarray(x) for x in jax.tree.leaves(llm.params)]
    asked = [{"prompt_token_ids": ids} for ids in PROMPTS[:2]]
    adapted = beams(llm, asked, [requests[3], None])
    assert adapted[1] == beams(llm, asked[1:], None)[0] != adapted[0]
    llm.merge_lora(4)
    assert beams(llm, asked[:1], None) == adapted[:1]
    merged = lora.merge(base, *lora.make(base, 4, **KINDS["patterns"]))
    assert answers(llm, PROMPTS[:2], None) == [tokens(merged, p) for p in PROMPTS[:2]]
    with pytest.raises(RuntimeError, match="an adapter is merged already: call unmerge_lora"):
        llm.merge_lora(4)
    llm.unmerge_lora()
    for old, new in zip(before, jax.tree.leaves(llm.params), strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(RuntimeError, match="no adapter is merged, or the weights have changed"):
        llm.unmerge_lora()


def test_a_pinned_adapter_stays_and_a_sleep_changes_nothing(llm, saved):
    _, _, requests, want = saved
    llm.add_lora(requests[1])
    assert llm.pin_lora(2)
    for i in (0, 2, 3, 0):
        assert answers(llm, [PROMPTS[i]], requests[i]) == [want[i]]
        assert 2 in llm.runner.adapters.places
    llm.sleep()
    llm.wake_up()
    assert answers(llm, PROMPTS, requests) == want
    assert "adapters: 4, of these on the device 3 of at most 3" in llm.report()
    other = llm.runner.fork()
    assert other.adapters.places == llm.runner.adapters.places
    other.close()


def test_a_host_with_a_scheduler_of_its_own_names_adapters(saved):
    """`Worker` refuses what it does not know while nothing has changed."""
    folder, base, requests, want = saved
    worker = Worker(
        str(folder), enable_lora=True, max_loras=2, max_lora_rank=8, dtype="float32",
        max_num_seqs=3, max_num_batched_tokens=16, token_buckets=(16,), decode_buckets=(3,),
        max_model_len=48, num_blocks=20, block_size=4, cache_dir=None,
    )  # fmt: skip
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config()
    for request in requests[:3]:
        worker.add_lora(request)

    def new(i, blocks, lora_id):
        made = tiny.new_request(f"{i}", PROMPTS[i], blocks=blocks)
        made.lora_id = lora_id
        return made

    both = [new(0, range(5), 1), new(1, range(5, 11), 2)]
    third, unknown = new(2, range(11, 16), 3), new(2, range(11, 16), 8)
    tokens = {"0": [], "1": []}
    counts = {"0": len(PROMPTS[0]), "1": len(PROMPTS[1])}
    for _ in range(4):
        output = worker.runner.step(tiny.scheduled(counts, both)).get()
        for name, gained in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[name] += gained
        counts, both = {"0": 1, "1": 1}, []
        with pytest.raises(RuntimeError, match="max_loras=2 adapters are in use, a request needs"):
            worker.runner.step(tiny.scheduled({"2": 3}, [third]))
        with pytest.raises(ValueError, match="lora_id=8 is no adapter that add_lora was given"):
            worker.runner.step(tiny.scheduled({"2": 3}, [unknown]))
    assert [tokens["0"], tokens["1"]] == [want[0][:4], want[1][:4]]
    assert worker.list_loras() == {1, 2, 3} and base
    with pytest.raises(RuntimeError, match="requests have adapter 2: abort them, or let them end"):
        worker.remove_lora(2)
    worker.shutdown()
