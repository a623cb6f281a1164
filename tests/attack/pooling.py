"""A model that pools: what its methods are asked, and the parameters of that."""

from collections.abc import Iterator
import random
from typing import Any

from jaxrunner.pooling.params import POOLING_TYPES, TASKS, PoolerConfig, PoolingParams
from tests.attack import models
from tests.attack.calls import Target
from tests.attack.harness import Case
from tests.attack.kinds import Kind, flag, instance, integer, one_of, text
from tests.attack.llm_methods import PROMPTS, Methods, is_plain

TASK = Kind(lambda v: v is None or (type(v) is str and v in TASKS), ("Embed", "", 3, b"embed"))
PARAMS: dict[str, Kind] = dict(
    dimensions=integer(1, 2**24, None), use_activation=flag(None), normalize=flag(None),
    truncate_prompt_tokens=Kind(
        lambda v: None if type(v) is int and v else v is None, (0, -2, 1.0, "1", True)),
    skip_reading_prefix_cache=flag(None), task=TASK,
)  # fmt: skip
CONFIG = dict(
    task=TASK, pooling_type=one_of(*POOLING_TYPES, None), use_activation=flag(None),
    dimensions=integer(1, 2**24, None),
)  # fmt: skip
ASKED = instance(PoolingParams, None)._replace(
    good=lambda v: v is None or type(v) is PoolingParams or (None if isinstance(v, list | tuple)
                                                             else False),
    near=({}, PoolingParams, [PoolingParams()] * 3, [None], [3], "embed", 3,
          PoolingParams(dimensions=99), PoolingParams(task="token_classify")),
)  # fmt: skip
TEXTS = Kind(
    lambda v: None if isinstance(v, str | list | tuple) else False if is_plain(v) else None,
    (["a", 3], [None], [], b"a", {"a": "b"}, ["A", "B", "C"], "\ud800", ["\ud800"], ""),
)
SHARED = dict(
    use_tqdm=flag(), truncate_prompt_tokens=PARAMS["truncate_prompt_tokens"], pooling_params=ASKED
)


class Pooling(Methods):
    """`encode`, `embed`, `classify`, `reward`, `score`, `PoolingParams` and `PoolerConfig`."""

    def __init__(self) -> None:
        self.llm = models.llm(runner="pooling")
        self.classifier = models.llm(
            runner="pooling", load_format="dummy",
            hf_overrides=dict(architectures=["LlamaForSequenceClassification"], num_labels=1),
        )  # fmt: skip
        self.targets = self.made(self.llm)

    def made(self, llm: Any) -> tuple[Target, ...]:
        kinds, needed = SHARED | dict(prompts=PROMPTS), dict(prompts="AB", use_tqdm=False)
        pair, texts = dict(data_1="A", data_2=["B"], use_tqdm=False), dict(data_1=TEXTS)
        other = self.classifier
        return (
            Target("encode", llm.encode, kinds | dict(pooling_task=text(None)), lambda: needed),
            Target("embed", llm.embed, kinds, lambda: needed),
            Target("classify", other.classify, kinds, lambda: needed),
            Target("reward", other.reward, kinds, lambda: needed),
            *(Target("score", one.score, SHARED | texts | dict(data_2=TEXTS), lambda: pair)
              for one in (llm, other)),
            Target("PoolingParams", PoolingParams, PARAMS),
            Target("PoolerConfig", PoolerConfig, CONFIG),
        )  # fmt: skip

    def case(self, rng: random.Random) -> Case:
        made = super().case(rng)
        # Good parameters that do not go with the model.
        return made._replace(fields=(*made.fields, "dimensions", "task", "normalize", "data_1"))

    def canary(self) -> Iterator[Any]:
        ids, whole = (
            {"prompt_token_ids": models.PROMPT},
            PoolingParams(skip_reading_prefix_cache=True),
        )
        pooled = [one.encode(ids, whole, use_tqdm=False) for one in (self.llm, self.classifier)]
        yield [one[0].outputs.data.tobytes() for one in pooled]

    def close(self) -> None:
        self.llm.close()
        self.classifier.close()
