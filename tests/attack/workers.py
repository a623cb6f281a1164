"""`Worker`: keywords, calls in a wrong order, and what its runner is told."""

import random
from typing import Any

from jaxrunner.worker.worker import Worker
from tests.attack import calls, models
from tests.attack.calls import Target
from tests.attack.harness import Case
from tests.attack.kinds import size
from tests.attack.llm_keywords import ALL, ROOM
from tests.attack.runners import Runner

SIZES = {name: value for name, value in models.SIZES.items() if name not in ("use_tqdm", "warm_up")}
OTHERS = ("tokenizer", "skip_tokenizer_init", "tokenizer_revision", "generation_config",
          "override_generation_config", "max_logprobs", "data_parallel_size",
          "use_tqdm")  # fmt: skip
KEYWORDS = {
    name: kind
    for name, kind in ALL.items()
    if name not in (*OTHERS, "warm_up", "chat_template", "logits_fn")
}
METHODS = ("init_device", "load_model", "determine_available_memory", "get_kv_cache_spec",
           "initialize_from_config", "execute_model", "sample_tokens", "sleep", "wake_up",
           "reload_weights", "save_params", "start_weight_update", "finish_weight_update",
           "check_health", "shutdown", "update_weights", "update_params")  # fmt: skip
ARGUMENTS: dict[str, tuple[Any, ...]] = dict(
    execute_model=(None,), save_params=("/proc/none",), update_weights=({},), update_params=((),)
)


def _open(**fields: Any) -> None:
    settings: dict[str, Any] = dict(model=str(models.checkpoint())) | fields
    worker = Worker(**settings)
    try:
        worker.init_device()
        worker.load_model()
        worker.determine_available_memory()
        worker.initialize_from_config()
    finally:
        worker.shutdown()


class Keywords(Runner):
    """`Worker(...)` from its making to its runner; and its methods in any order."""

    def __init__(self) -> None:
        self.worker = worker()
        self.runner = self.worker.runner

    def case(self, rng: random.Random) -> Case:
        if rng.random() < 0.2:
            return self._order(rng)
        targets = (
            Target("Worker", _open, KEYWORDS, lambda: dict(SIZES)),
            Target("Worker", _open, KEYWORDS | ROOM, lambda: {**SIZES, "num_blocks": None}),
            Target("initialize_from_config", self._initialize,
                   dict(num_blocks=size(1, 512, 10**12, None))),
        )  # fmt: skip
        made = calls.case(rng, targets)
        return made._replace(fields=(*made.fields, r"config\.json", "sharded_state", "num_blocks"))

    def _initialize(self, **fields: Any) -> None:
        other = Worker(str(models.checkpoint()), **SIZES)
        other.init_device()
        other.load_model()
        try:
            other.initialize_from_config(**fields)
        finally:
            other.shutdown()

    def _order(self, rng: random.Random) -> Case:
        names = [rng.choice(METHODS) for _ in range(rng.randrange(1, 6))]

        def call() -> None:
            other, refused = Worker(str(models.checkpoint()), **SIZES), None
            for name in names:
                try:
                    getattr(other, name)(*ARGUMENTS.get(name, ()))
                except (RuntimeError, TypeError, ValueError) as error:
                    refused = refused or error
            other.shutdown()
            if refused is not None:
                raise refused

        fields = (*METHODS, "sleep", "tags", "scheduler_output", "SchedulerOutput", "folder",
                  "params", "/proc/none", "weight update")  # fmt: skip
        return Case(call, fields, None, f"Worker.{'.'.join(names)}")

    def close(self) -> None:
        self.worker.shutdown()


def worker() -> Worker:
    """Returns a worker that is ready to run."""
    made = Worker(str(models.checkpoint()), **SIZES)
    made.init_device()
    made.load_model()
    made.initialize_from_config()
    return made


class Steps(Runner):
    """`Worker.execute_model` and `sample_tokens` with scheduler outputs that lie."""

    def __init__(self) -> None:
        self.worker = worker()
        self.runner = self.worker.runner

    def close(self) -> None:
        self.worker.shutdown()
