"""Requests and adapters in random order: each token is the merged model's, computed alone."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from jaxrunner import LoRARequest
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.scheduling.request import Request
from tests.outside import checkpoint, float64_llama
from tests.support import lora
from tests.support.compilations import compilations

SETTINGS: dict[str, Any] = checkpoint.LLAMA | dict(architectures=["LlamaForCausalLM"])
IDS = range(1, 6)
PLACES = 2
NEAR = 1e-3  # logits that float32 may rank otherwise than float64


@dataclass
class Asked:
    """A request, the weights that its adapter makes of the model, and its tokens that they gave."""

    request: Request
    tensors: dict[str, np.ndarray]
    num_compared: int | None = None  # None for all; else those before its adapter changed


class Driver:
    """Does one random thing to an engine before each of its steps."""

    def __init__(self, engine: Engine, base: dict[str, np.ndarray], seed: int):
        self.engine, self.base, self.rng = engine, base, np.random.default_rng(seed)
        self.tensors = {0: base}  # by id of adapter
        self.asked: dict[str, Asked] = {}  # unfinished
        self.heads = [self.rng.integers(61, size=n).tolist() for n in (5, 9, 12)]
        self.num_added, self.seen = 0, dict.fromkeys((*ACTIONS, "compared", "mixed", "updated"), 0)

    def run(self, num_steps: int) -> None:
        """Steps, then lets all requests end."""
        names, odds = list(ACTIONS), np.array(list(ACTIONS.values()), float)
        for _ in range(num_steps):
            name = names[self.rng.choice(len(names), p=odds / odds.sum())]
            self.seen[name] += getattr(self, name)() or 0
            self._step()
        while self.engine.has_unfinished:
            self._step()
        assert not self.asked

    def ask(self) -> bool:
        if len(self.asked) > 7:
            return False
        lora_id = int(self.rng.choice(sorted(self.tensors)))
        head = self.heads[self.rng.integers(3)]  # prefixes that others have too
        prompt = head + self.rng.integers(61, size=self.rng.integers(1, 5)).tolist()
        adapter = LoRARequest(f"{lora_id}", lora_id) if lora_id else None
        params = checkpoint.greedy(int(self.rng.integers(1, 14)))
        self.num_added += 1
        name = f"{self.num_added}"
        request = self.engine.add(name, prompt, params, lora_request=adapter)
        self.asked[name] = Asked(request, self.tensors[lora_id])
        return True

    def abort(self) -> bool:
        if not self.asked:
            return False
        name = self.rng.choice(sorted(self.asked))
        self._compare(self.asked.pop(name))
        self.engine.abort([name])
        return True

    def add_or_update(self) -> bool:
        """Adds an adapter, or takes another in its place, whoever has it."""
        lora_id, rank = int(self.rng.choice(IDS)), int(self.rng.integers(1, 9))
        targets = [name for name in lora.ALL if self.rng.random() < 0.6] or ["q_proj"]
        made = lora.make(self.base, int(self.rng.integers(2**30)), rank=rank, targets=targets)
        for asked in self.asked.values():
            if asked.request.lora_id == lora_id and asked.num_compared is None:
                asked.num_compared = len(asked.request.output_token_ids)
                self.seen["updated"] += asked.num_compared > 0
        adapter = LoRARequest(f"{lora_id}", lora_id, lora_tensors=made[0], lora_config=made[1])
        assert self.engine.worker.add_lora(adapter) == (lora_id not in self.tensors)
        self.tensors[lora_id] = lora.merge(self.base, *made)
        return True

    def remove(self) -> bool:
        lora_id = int(self.rng.choice(IDS))
        if any(asked.request.lora_id == lora_id for asked in self.asked.values()):
            with pytest.raises(RuntimeError, match=f"requests have adapter {lora_id}: abort them"):
                self.engine.worker.remove_lora(lora_id)
            return False
        known = self.tensors.pop(lora_id, None) is not None
        assert self.engine.worker.remove_lora(lora_id) == known
        return known

    def pin(self) -> bool:
        """Pins an adapter if there is a place for it; one that is pinned leaves with `remove`."""
        worker, adapters = self.engine.worker, self.engine.runner.adapters
        assert adapters is not None
        held = set(self.engine.runner.requests.lora_ids.values()) - {0}
        lora_id = int(self.rng.choice([*self.tensors]))
        if not lora_id or adapters.pinned:
            return False
        if len(held | {lora_id}) > PLACES:
            with pytest.raises(RuntimeError, match=f"max_loras={PLACES} adapters are in use"):
                worker.pin_lora(lora_id)
            return False
        return worker.pin_lora(lora_id)

    def _step(self) -> None:
        self.engine.step()
        running = {r.lora_id for r in self.engine.scheduler.running}
        assert len(running - {0}) <= PLACES
        self.seen["mixed"] += len(running) > 2
        for name in [n for n, one in self.asked.items() if one.request.finish_reason is not None]:
            asked = self.asked.pop(name)
            assert asked.request.finish_reason == "length"
            self._compare(asked)

    def _compare(self, asked: Asked) -> None:
        """Holds the tokens against float64 logits of the merged model, all positions at once."""
        prompt, output = asked.request.prompt_token_ids, list(asked.request.output_token_ids)
        output = output[: asked.num_compared]
        if not output:
            return
        logits = float64_llama.logits(asked.tensors, SETTINGS, [*prompt, *output[:-1]])
        rows = logits[len(prompt) - 1 :]
        assert (rows[range(len(output)), output] >= rows.max(1) - NEAR).all()
        self.seen["compared"] += len(output)


# What is done before a step, and how often.
ACTIONS = dict(ask=10, abort=1, add_or_update=1, remove=1, pin=0.3)


@pytest.mark.parametrize(
    "num_steps", [100, pytest.param(1_500, marks=pytest.mark.slow)], ids=["quick", "long"]
)
def test_tokens_are_those_of_merged_models_whatever_comes_and_goes(
    tmp_path: Any, num_steps: int, drive_steps: int
):
    num_steps = max(num_steps, drive_steps)
    base = checkpoint.write(tmp_path, llama, SETTINGS)
    sizes = dict(enable_lora=True, max_loras=PLACES, max_lora_rank=8, num_decode_steps=2)
    with checkpoint.start(tmp_path, **sizes, num_blocks=14, warm_up=True) as llm:
        driver = Driver(llm.engine, base, seed=num_steps + 2)
        for _ in IDS:
            driver.add_or_update()
        llm.engine.runner.programs.strict = True  # nothing is compiled any more, nor by JAX itself
        with compilations() as compiled:
            driver.run(num_steps)
        assert not compiled
        assert min(driver.seen.values()) > 0 and driver.seen["compared"] > num_steps
        assert llm.engine.scheduler.num_preemptions or num_steps < 1000
        assert llm.list_loras() == driver.tensors.keys() - {0}
