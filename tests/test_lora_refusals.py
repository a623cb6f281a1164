"""What adapters cannot be, said by name, before anything reaches the device."""

from typing import Any

import numpy as np
import pytest

from jaxrunner import LoRARequest
from jaxrunner.bench import adapters
from jaxrunner.config import EngineConfig
from jaxrunner.lora.device_adapters import DeviceAdapters
from jaxrunner.lora.module_names import by_names_of_model
from jaxrunner.models.llama import llama
from jaxrunner.models.mixtures.qwen3_moe import qwen3_moe
from jaxrunner.scheduling.request import NewRequest
from jaxrunner.worker.worker import Worker
from tests.outside import checkpoint
from tests.support import lora, tiny

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
UP = "model.layers.0.mlp.up_proj"
A, B = (f"base_model.model.{UP}.lora_{part}.weight" for part in "AB")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    return folder, checkpoint.write(folder, llama, SETTINGS)


@pytest.fixture(scope="module")
def llm(saved):
    with checkpoint.start(saved[0], enable_lora=True, max_loras=2, max_lora_rank=8) as llm:
        yield llm


def wide(tensors):
    return {A: np.zeros((9, 20), np.float32), B: np.zeros((28, 9), np.float32)}


def named(name, shape=(3, 20)):
    return lambda tensors: tensors | {name: np.ones(shape, np.float32)}


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": (dict(peft_type="IA3"), "peft_type must be 'LORA', got 'IA3'"),
    "bias": (dict(bias="all"), "bias='all' is not supported, only 'none'"),
    "DoRA": (dict(use_dora=True), "'use_dora'=True is not supported: running without it would"),
    "experts": (dict(target_parameters=["x"]), r"'target_parameters'=\['x'\] is not supported"),
    "more layers": (dict(layer_replication=[[0, 1], [0, 1]]), "'layer_replication'=.* is not supp"),
    "PiSSA": (dict(init_lora_weights="pissa_niter_4"), "changes the base model's weights too"),
    "rsLoRA": (dict(use_rslora=1), "use_rslora must be true or false"),
    "patterns": (dict(rank_pattern=[3]), r"rank_pattern must map patterns to numbers, got \[3\]"),
    "a pattern": (dict(alpha_pattern={"(": 3}), "which is no pattern of at most 1000 characters"),
    "a pattern without end": (dict(rank_pattern={r"((\w|\.)+)+!": 3}), "repetitions and none of a"),
    "many repetitions": (dict(rank_pattern={"a*" * 5: 3}), "which is no pattern .* 4 repetitions"),
    "an array for a setting": (dict(alpha_pattern=np.zeros(2)), "alpha_pattern must map patterns"),
    "a list for a bias": (dict(bias=np.array(["none", "all"])), "bias=array.* is not supported"),
    "rank": (dict(r=0), "r must be a rank of at least 1, got 0"),
    "alpha": (dict(lora_alpha=float("inf")), "lora_alpha must be a number, got inf"),
    "a huge alpha": (dict(lora_alpha=10**400), "lora_alpha must be a number, got 1000"),
    "another rank": (dict(r=5), r"up_proj has 3 rows, the config says r=5"),
    "a rank too high": (dict(r=9), "an adapter of rank 9, max_lora_rank=8: raise max_lora_rank"),
}  # fmt: skip
TENSORS: dict[str, tuple[Any, str]] = {
    "embeddings": (named("base_model.model.model.embed_tokens.lora_embedding_A"),
                   "which is no lora_A or lora_B of a product: only these are supported"),
    "head": (named("lm_head.weight"),
             "which stands for the model's own, and the engine has no room for it: add 'lm_head'"),
    "ranks of the head": (lambda tensors: {n.replace(UP, "lm_head"): t for n, t in tensors.items()},
                          r"changes \['lm_head'\], which are no products of a layer of this model"),
    "a number for a name": (named(3), "has the tensor 3, which is no lora_A or lora_B"),
    "texts": (lambda tensors: tensors | {A: tensors[A].astype("U9")}, "which holds no floats, got"),
    "two for one": (lambda tensors: tensors | {f"{UP}.lora_B.default.weight": tensors[B]},
                    rf"has the tensors '{B}' and '{UP}\.lora_B\.default\.weight' for one weight"),
    "none": (lambda tensors: {}, "has no lora_A and lora_B: save the adapter again"),
    "half": (lambda tensors: {A: tensors[A]}, "has one of lora_A and lora_B alone of model.layers"),
    "no product": (lambda tensors: {n.replace("up_proj", "norm"): t for n, t in tensors.items()},
                   "which are no products of a layer of this model: it may change"),
    "a shape": (lambda tensors: tensors | {A: tensors[A][:, :5]},
                r"must be \[rank, 20\] and \[28, rank\], got \[3, 5\] and \[28, 3\]"),
    "NaN": (lambda tensors: tensors | {B: tensors[B] * np.nan},
            "lora_B of model.layers.0.mlp.up_proj holds values that are NaN or infinite"),
}  # fmt: skip


def request(base, change=lambda tensors: tensors, **config):
    tensors, told = lora.make({f"{UP}.weight": base[f"{UP}.weight"]}, 1)
    return LoRARequest("x", 3, lora_tensors=change(tensors), lora_config=told | config)


@pytest.mark.parametrize("name", [*CONFIGS, *TENSORS])
def test_an_adapter_that_is_not_supported_is_refused_by_name(llm, saved, name):
    config, match = CONFIGS.get(name, ({}, ""))
    change = wide if name == "a rank too high" else lambda tensors: tensors
    change, match = TENSORS.get(name, (change, match))
    with pytest.raises(ValueError, match=match):
        llm.add_lora(request(saved[1], change, **config))
    assert not llm.list_loras()


def test_routers_and_experts_have_no_adapters(tmp_path):
    settings = SETTINGS | dict(
        architectures=["Qwen3MoeForCausalLM"], num_experts=3, num_experts_per_tok=2,
        moe_intermediate_size=12, norm_topk_prob=True,
    )  # fmt: skip
    base = checkpoint.write(tmp_path, qwen3_moe, settings)
    with checkpoint.start(tmp_path, enable_lora=True, max_lora_rank=8) as llm:
        for part in ("gate", "experts.1.up_proj"):
            module = f"model.layers.1.mlp.{part}"
            weight, targets = f"{module}.weight", [part.rpartition(".")[2]]
            made = lora.make({weight: base[weight]}, 1, targets=targets)
            asked = LoRARequest("x", 1, lora_tensors=made[0], lora_config=made[1])
            with pytest.raises(ValueError, match=rf"changes \['{module}'\], which are no products"):
                llm.add_lora(asked)


def test_names_of_modules_say_one_of_the_model():
    known = ["language_model.model.layers.0.q_proj", "layers.0.k_proj", "model.layers.0.k_proj"]
    given = {"model.language_model.layers.0.q_proj": 1, "vision.layers.0.q_proj": 2, "x": 3}
    assert by_names_of_model(given, known, ("model.vision.",)) == {known[0]: 1, "x": 3}
    with pytest.raises(ValueError, match=r"may be each of \[.*\]: name one of these"):
        by_names_of_model({"model.model.layers.0.k_proj": 1}, known)
    both = {known[0]: 1, "layers.0.q_proj": 2}
    with pytest.raises(ValueError, match=r"are both language_model.* of the model: take one of"):
        by_names_of_model(both, known)


def test_requests_name_adapters_that_there_are(llm, saved, tmp_path):
    prompt = {"prompt_token_ids": [1, 2]}
    [output] = llm.generate(prompt, lora_request=LoRARequest("x", 5), use_tqdm=False)
    assert output.error and "names adapter 5, which add_lora was not given" in output.error
    with pytest.raises(TypeError, match="lora_request must be a LoRARequest or None, got 'x'"):
        llm.generate(prompt, lora_request="x")
    with pytest.raises(FileNotFoundError, match=r"lora_path must be a folder with adapter_config"):
        llm.add_lora(LoRARequest("x", 5, tmp_path / "none"))
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest with lora_path or"):
        llm.add_lora(LoRARequest("x", 5))
    with pytest.raises(ValueError, match=r"lora_id=5 is no adapter that add_lora was given"):
        llm.merge_lora(5)
    for i in (1, 2):
        llm.add_lora(LoRARequest("x", i, **told(saved[1])))
    with pytest.raises(ValueError, match=r"lora_id=7 is no adapter that add_lora was given"):
        llm.pin_lora(7)
    llm.pin_lora(1)
    with pytest.raises(ValueError, match=r"pin_lora\(2\) would leave no place for other adapters"):
        llm.pin_lora(2)
    with pytest.raises(RuntimeError, match=r"max_loras=2 adapters are in use, a request needs an"):
        own: DeviceAdapters = llm.runner.adapters.copy()
        own.known[3] = own.known[2]
        own.admit([new(2), new(3)], [])
    for i in (1, 2):
        llm.remove_lora(i)


def test_a_request_that_is_refused_brings_no_adapter(llm, saved):
    asked, params = LoRARequest("x", 4, **told(saved[1])), checkpoint.greedy(1)
    nothing: Any = None
    live = llm.engine.add("live", [1, 2], params)
    with pytest.raises(TypeError, match="priority must be an integer"):
        llm.engine.add("a", [1, 2], params, priority=nothing, lora_request=asked)
    with pytest.raises(ValueError, match="request 'live' is unfinished"):
        llm.engine.add("live", [1, 2], params, lora_request=asked)
    with pytest.raises(ValueError, match="prefix_from='live' has another prompt"):
        llm.engine.add("a", [1, 3], params, prefix_from=live, lora_request=asked)
    assert not llm.list_loras()
    llm.engine.abort(["live"])


def told(base) -> dict[str, Any]:
    made = request(base)
    return dict(lora_tensors=made.lora_tensors, lora_config=made.lora_config)


def new(lora_id) -> NewRequest:
    made = tiny.new_request(f"{lora_id}", [1], blocks=[0])
    made.lora_id = lora_id
    return made


def test_adapters_on_the_host_are_few_if_asked(saved):
    sizes: dict[str, Any] = dict(enable_lora=True, max_loras=1, max_lora_rank=8, max_cpu_loras=2)
    prompt = {"prompt_token_ids": [1, 2]}
    with checkpoint.start(saved[0], **sizes) as llm:
        for i in (1, 2):
            llm.add_lora(LoRARequest("x", i, **told(saved[1])))
        params = checkpoint.greedy(1)
        llm.generate(prompt, params, lora_request=LoRARequest("x", 1), use_tqdm=False)
        assert llm.add_lora(LoRARequest("x", 3, **told(saved[1]))) and llm.list_loras() == {1, 3}
        for name, i in dict(a=1, b=3).items():
            llm.engine.add(name, [1, 2], params, lora_request=LoRARequest("x", i))
        with pytest.raises(RuntimeError, match="max_cpu_loras=2 adapters are all in use or pinned"):
            llm.add_lora(LoRARequest("x", 4, **told(saved[1])))


@pytest.mark.parametrize("fields, error, match", [
    (dict(lora_int_id=0), ValueError, "lora_int_id=0 is out of range"),
    (dict(lora_name=""), ValueError, "lora_name must be a text of some characters, got ''"),
    (dict(lora_tensors=[]), TypeError, r"lora_tensors must be a mapping or None, got \[\]"),
    (dict(lora_tensors={}), ValueError, "lora_tensors and lora_config belong together"),
    (dict(lora_tensors={}, lora_config={}, lora_path="x"), ValueError,
     "lora_path and lora_tensors each say the weights: give one"),
], ids=str)  # fmt: skip
def test_a_request_for_an_adapter_is_whole(fields, error, match):
    with pytest.raises(error, match=match):
        LoRARequest(**dict(lora_name="x", lora_int_id=1) | fields)


def test_engines_without_adapters_say_so():
    sizes: dict[str, Any] = dict(max_model_len=8, num_blocks=2)
    with pytest.raises(
        ValueError, match="max_lora_rank=16 and max_cpu_loras=None are of an engine"
    ):
        EngineConfig(**sizes, max_loras=2)
    with pytest.raises(ValueError, match=r"max_lora_rank must be one of \(8, 16, .*, got 12: take"):
        EngineConfig(**sizes, enable_lora=True, max_lora_rank=12)
    with pytest.raises(RuntimeError, match="adapters want enable_lora=True: build the engine with"):
        Worker.of(tiny.runner()).list_loras()
    with pytest.raises(ValueError, match="--lora must be a number of adapters and their rank"):
        adapters.read("8")
    assert adapters.read("8x16") == (8, 16)
