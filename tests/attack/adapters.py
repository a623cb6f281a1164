"""Adapters: `LoRARequest`, the methods that take one or its id, and folders that were changed."""

from collections.abc import Iterator
import random
from typing import Any

from jaxrunner import LoRARequest
from jaxrunner.models.llama import llama
from tests.attack import models, values
from tests.attack.calls import Target
from tests.attack.harness import Case, in_words
from tests.attack.kinds import Kind, flag, instance, integer, text
from tests.attack.llm_methods import ONE, Methods, fixed
from tests.attack.tamper import Folder
from tests.support import lora, tiny
from tests.support.checkpoints import split

UP = "model.layers.0.mlp.up_proj.weight"
ID = integer(1, 2**31 - 1)
MAPPING = Kind(lambda v: True if v is None else None if isinstance(v, dict) else False,
               ([], "a", {1: 2}, {"a": 1}, {}))  # fmt: skip
REQUEST: dict[str, Kind] = dict(
    lora_name=text(), lora_int_id=ID, lora_tensors=MAPPING, lora_config=MAPPING,
    lora_path=Kind(lambda v: None, (3, b"a", "", "/none", "\0", True, [])),
)  # fmt: skip
# Of adapter_config.json; the last ones are patterns that would be searched for ever.
CONFIG: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("r", (0, -1, 3.0, "3", None, 2**40, True, 4)),
    ("lora_alpha", (None, "7", values.NAN, values.INF, True, [7], 1e308)),
    ("peft_type", ("IA3", None, 3, "")),
    ("bias", ("all", None, 3, [])),
    ("use_rslora", (1, None, "yes", [])),
    ("init_lora_weights", ("pissa", 3, ["olora"])),
    ("use_dora", (True, "yes", 1)),
    ("rank_pattern", ([], {"(": 1}, {"up_proj": 0}, {3: 3}, {"(?P<a": 3}, {"a" * 2000: 3})),
    (
        "alpha_pattern",
        ([3], {"up_proj": "a"}, {"(?=a)*": 1}, {"": 2}, {"a{99999}": 1}, {r"q.*w.*e.*r.*t.*": 1}),
    ),
    ("rank_pattern", ({r"((\w|\.)+)+!": 3}, {r"(.*)*!": 3}, {r"(\w+\.?)+!": 3})),
    ("alpha_pattern", ({"".join(r"[\w.]+" for _ in range(20)) + "!": 3},)),
    ("no_such", (3, {}, "a")),
)


class Adapters(Methods):
    """An LLM with adapters."""

    def __init__(self) -> None:
        self.llm = models.llm(enable_lora=True, max_loras=2, max_lora_rank=8)
        assert self.llm.runner.adapters is not None
        self.on_device = self.llm.runner.adapters
        weights = split(llama, *tiny.model_and_params())
        self.made_of = lora.make({UP: weights[UP]}, 1)
        folder = models.scratch() / "adapter"
        if not folder.exists():
            lora.write(folder, *self.made_of)
        self.folder = Folder(folder)
        self.llm.add_lora(LoRARequest("good", 1, folder))
        self.targets = self.made(self.llm)

    def made(self, llm: Any) -> tuple[Target, ...]:
        asked = instance(LoRARequest)._replace(near=(None, LoRARequest("none", 9), {}, "good", 1))
        one = dict(lora_id=ID)
        needed: dict[str, Any] = dict(prompts="AB", sampling_params=ONE, use_tqdm=False)
        adapters = dict(lora_request=asked._replace(good=lambda v: v is None or (
            None if isinstance(v, list | tuple | LoRARequest) else False)))  # fmt: skip
        return (
            Target("LoRARequest", LoRARequest, REQUEST,
                   lambda: dict(lora_name="a", lora_int_id=7)),
            Target("add_lora", llm.add_lora, dict(lora_request=asked), unknown=False),
            *(Target(name, getattr(llm, name), one, unknown=False)
              for name in ("remove_lora", "pin_lora", "merge_lora")),
            Target("generate", fixed(llm.generate), adapters | dict(use_tqdm=flag()),
                   lambda: needed),
        )  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        return rng.choice((super().case, self._tensors, self._config, self._file))(rng)

    def _file(self, rng: random.Random) -> Case:
        how = self.folder.tamper(rng)
        return self._added(("adapter",), how, lora_path=self.folder.path)

    def _config(self, rng: random.Random) -> Case:
        name, near = rng.choice(CONFIG)
        value = rng.choice(near) if rng.random() < 0.7 else values.draw(rng)
        tensors, config = self.made_of
        told = in_words("lora_config", {name: value})
        config = config | {name: value}
        names = (name, "lora_alpha", "lora_A", "rank", "up_proj")
        return self._added(names, told, lora_tensors=tensors, lora_config=config)

    def _tensors(self, rng: random.Random) -> Case:
        tensors, config = self.made_of
        name = rng.choice(list(tensors))
        x = tensors[name]
        value = rng.choice((
            x[:-1], x[None], x.T, x.astype(object), x.astype("U9"), x.astype(complex), x > 0,
            x * values.NAN, x.tolist(), x[:0], values.draw(rng), values.atom(rng),
        ))  # fmt: skip
        other: Any = rng.choice(
            (name, name, name, "", "no.such.weight", 3, None, name.upper(), b"a")
        )
        changed = {n: t for n, t in tensors.items() if n != name} | {other: value}
        told = in_words("lora_tensors", {str(other): value})
        names = ("lora_A", "lora_B", "rank", "tensor", "lora_tensors", "up_proj")
        return self._added(names, told, lora_tensors=changed, lora_config=config)

    def _added(self, names: tuple[str, ...], told: str, **fields: Any) -> Case:
        def call() -> None:
            self.llm.add_lora(LoRARequest("adapter", 5, **fields))

        return Case(call, names, None, told)

    def status(self) -> Any:
        worker = self.llm.engine.worker
        return (
            super().status(), self.llm.list_loras(), dict(worker.lora_versions),
            self.llm.weights_version, set(self.on_device.pinned),
        )  # fmt: skip

    def mend(self) -> None:
        self.folder.mend()
        if self.llm.engine.worker._is_merged:
            self.llm.unmerge_lora()
        for lora_id in self.llm.list_loras() - {1}:
            self.llm.remove_lora(lora_id)
        if 1 not in self.llm.list_loras() or 1 in self.on_device.pinned:
            self.llm.remove_lora(1)
            self.llm.add_lora(LoRARequest("good", 1, self.folder.path))

    def canary(self) -> Iterator[Any]:
        prompt, request = {"prompt_token_ids": models.PROMPT}, LoRARequest("good", 1)
        found = []
        for adapter in (request, None):
            [one] = self.llm.generate(prompt, models.PARAMS, lora_request=adapter, use_tqdm=False)
            found.append((one.outputs[0].token_ids, one.error))
        yield found
