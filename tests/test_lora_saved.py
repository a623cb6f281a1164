"""Embeddings and heads that adapters have in place of the model's (PEFT's `modules_to_save`)."""

import functools
from typing import Any

import numpy as np
import pytest

from jaxrunner import LoRARequest
from jaxrunner.config import EngineConfig
from jaxrunner.models.llama import llama
from tests.outside import checkpoint, float64_llama
from tests.support import lora

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(
    architectures=["LlamaForCausalLM"], hidden_size=24, intermediate_size=32, vocab_size=64,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PROMPTS = checkpoint.prompts(5, 11, 3, 7, 9)
SIZES: dict[str, Any] = dict(
    enable_lora=True, max_loras=3, max_lora_rank=8, logprobs_mode="raw_logits",
    lora_modules_to_save=["embed_tokens", "lm_head"],
)  # fmt: skip
KINDS = {"both": (EMBED, HEAD), "embedding": (EMBED,), "head": (HEAD,), "neither": ()}


@pytest.fixture(scope="module", params=["untied", pytest.param("tied", marks=pytest.mark.slow)])
def saved(request, tmp_path_factory):
    """A folder of a checkpoint, its tensors with a head, and adapters by what they have."""
    folder, tied = tmp_path_factory.mktemp("lora"), request.param == "tied"
    base = checkpoint.write(folder, llama, SETTINGS | dict(tie_word_embeddings=tied))
    base.setdefault(HEAD, base[EMBED])
    return folder, base, {kind: made(base, i, kind) for i, kind in enumerate(KINDS, 1)}, tied


def made(base, seed: int, kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    rng, names = np.random.default_rng(seed), KINDS[kind]
    tensors, config = lora.make(base, seed, rank=2)
    more = rng.normal(size=(len(names), 64, 24)).astype(np.float32) * 0.4
    listed = [name.rsplit(".", 1)[0] for name in names]  # PEFT has ends, or whole names
    tensors |= {f"{lora.PREFIX}{name}": x for name, x in zip(names, more, strict=True)}
    return tensors, config | dict(modules_to_save=listed or None)


def merged(base, tensors, config) -> dict[str, np.ndarray]:
    own = {name: tensors.get(f"{lora.PREFIX}{name}", x) for name, x in base.items()}
    return lora.merge(own, tensors, config)


def wanted(tensors, prompt) -> list[int]:
    of = functools.partial(float64_llama.logits, tensors, SETTINGS)
    return float64_llama.greedy(of, prompt, 8)


def requests_of(adapters) -> list[LoRARequest]:
    return [
        LoRARequest(kind, i, lora_tensors=of[0], lora_config=of[1])
        for i, (kind, of) in enumerate(adapters.items(), 1)
    ]


def answers(llm, prompts, adapters, **params: Any) -> list[Any]:
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(
        asked, checkpoint.greedy(8, **params), lora_request=adapters, use_tqdm=False
    )
    assert not [o.error for o in outputs if o.error]
    return outputs


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
def test_tokens_and_logits_are_those_of_merged_models(saved):
    folder, base, adapters, tied = saved
    all_of = [*(merged(base, *of) for of in adapters.values()), base]
    want = [wanted(of, prompt) for of, prompt in zip(all_of, PROMPTS, strict=True)]
    with checkpoint.start(folder, **SIZES) as llm:
        requests = [*requests_of(adapters), None]
        assert tokens(answers(llm, PROMPTS, requests)) == want
        outputs: Any = answers(llm, PROMPTS, requests, prompt_logprobs=0)
        assert tokens(outputs) == want
        for output, tensors, prompt in zip(outputs, all_of, PROMPTS, strict=True):
            logits = float64_llama.logits(tensors, SETTINGS, prompt)
            got = [
                one[t].logprob
                for one, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
            ]
            rows = logits[range(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(got, rows, rtol=1e-4, atol=1e-4)
        if tied:
            with pytest.raises(ValueError, match="'embedding' has another embedding or another he"):
                llm.merge_lora(2)
            return
        before = [np.asarray(x) for x in (llm.params.embed, llm.params.head.weight)]
        for i, of in enumerate(all_of[:-1], 1):
            llm.merge_lora(i)
            assert tokens(answers(llm, PROMPTS[:1], None)) == [wanted(of, PROMPTS[0])]
            llm.unmerge_lora()
        after = [np.asarray(x) for x in (llm.params.embed, llm.params.head.weight)]
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(old, new)
        llm.sleep()
        llm.wake_up()
        assert tokens(answers(llm, PROMPTS, requests)) == want


PARTS: dict[str, dict[str, Any]] = {
    "drafts and several steps": dict(
        num_decode_steps=2, max_num_batched_tokens=16, token_buckets=(16,),
        speculative_config=dict(method="draft_model", num_speculative_tokens=2),
    ),
    "two stages of two devices": dict(pipeline_parallel_size=2, tensor_parallel_size=2),
}  # fmt: skip


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("drafts and several steps", marks=pytest.mark.slow),
        pytest.param("two stages of two devices", marks=[pytest.mark.devices(4), pytest.mark.slow]),
    ],
)
def test_other_parts_of_an_engine_go_with_them(saved, part):
    folder, base, adapters, tied = saved
    if tied:
        pytest.skip("untied weights show it")
    options = dict(PARTS[part])
    if "speculative_config" in options:
        options["speculative_config"] = options["speculative_config"] | dict(model=str(folder))
    all_of = [*(merged(base, *of) for of in adapters.values()), base]
    with checkpoint.start(folder, **SIZES | options) as llm:
        got = tokens(answers(llm, PROMPTS, [*requests_of(adapters), None]))
    assert got == [wanted(of, prompt) for of, prompt in zip(all_of, PROMPTS, strict=True)]


def test_what_has_no_room_is_refused_by_name(saved):
    folder, _, adapters, tied = saved
    if tied:
        pytest.skip("untied weights show it")
    tensors, config = adapters["both"]
    name = f"{lora.PREFIX}{HEAD}"
    with pytest.raises(
        ValueError, match=r"lora_modules_to_save=\('x',\) must be embedding and hea"
    ):
        checkpoint.start(folder, **SIZES | dict(lora_modules_to_save=["x"]))
    with pytest.raises(ValueError, match=r"=\('x',\) is of an engine with adapters: set enable_lo"):
        EngineConfig(max_model_len=8, num_blocks=2, lora_modules_to_save=("x",))
    with checkpoint.start(folder, **SIZES | dict(lora_modules_to_save=["lm_head"])) as llm:
        size = llm.memory_plan.weights

        def add(tensors, **more):
            llm.add_lora(LoRARequest("x", 1, lora_tensors=tensors, lora_config=config | more))

        with pytest.raises(ValueError, match="engine has no room for it: add 'embed_tokens' to"):
            add(tensors)
        rest = {n: x for n, x in tensors.items() if not n.endswith(EMBED)}
        with pytest.raises(ValueError, match=r"no tensor of model.embed_tokens, which modules_to"):
            add(rest)
        with pytest.raises(ValueError, match=r"'modules_to_save'=\['score'\] is not supported"):
            add(rest, modules_to_save=["lm_head", "score"])
        with pytest.raises(
            ValueError, match=r"lm_head of the adapter must be \[64, 24\] as the mo"
        ):
            add(rest | {name: tensors[name][:5]}, modules_to_save=["lm_head"])
        with pytest.raises(ValueError, match="lm_head of the adapter holds values that are NaN or"):
            add(rest | {name: tensors[name] * np.nan}, modules_to_save=["lm_head"])
        twice = f"has the tensors '{name}' and '{HEAD}' for one weight: take one of them out"
        with pytest.raises(ValueError, match=twice):
            add(rest | {HEAD: tensors[name]})
        add(rest, modules_to_save=None)  # PEFT saves these by itself too
    with checkpoint.start(folder, **SIZES | dict(lora_modules_to_save=[])) as llm:
        assert size - llm.memory_plan.weights == 3 * (64 * 24 * 4) + 3
