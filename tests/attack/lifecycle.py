"""New weights, sleep, files and settings of a model at work: `Lifecycle`, by an LLM."""

from collections.abc import Callable, Iterator
import itertools
from pathlib import Path
import random
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrunner.models.llama import llama
from tests.attack import calls, models, values
from tests.attack.calls import Target
from tests.attack.harness import Case, Entry, in_words
from tests.attack.kinds import Kind, anything, empty, flag, one_of, real, size
from tests.support import tiny
from tests.support.checkpoints import split

NAMES = itertools.count()


def _array(rng: random.Random, like: Any) -> tuple[Any, bool | None]:
    """Returns what is to stand for an array, and whether it may."""
    x = np.asarray(like)
    broken = x.copy()
    broken.flat[rng.randrange(x.size)] = rng.choice((values.NAN, values.INF, -values.INF))
    makers: tuple[Callable[[], tuple[Any, bool | None]], ...] = (
        lambda: (x, True),
        lambda: (jnp.asarray(x), True),
        lambda: (broken, False),
        lambda: (x[:-1], False),
        lambda: (x[None], False),
        lambda: (x.T if x.ndim > 1 and x.shape[0] != x.shape[1] else x[1:], False),
        lambda: (x.astype(object), False),
        lambda: (x.astype(complex), False),
        lambda: (x.astype("U9"), False),
        lambda: (x > 0, False),
        lambda: (x.astype(np.int32), False),
        lambda: (x.astype(np.float64), None),
        lambda: (x.astype(np.float16), None),
        lambda: (x * 1e38 * 1e38, False),
        lambda: (x.tolist(), None),
        lambda: (np.zeros((0, *x.shape)), False),
        lambda: (values.draw(rng), None),
        lambda: (values.atom(rng), None),
    )
    return rng.choice(makers)()


class Weights(Entry):
    """`update_params`, `update_weights` and `reload_weights` with what are no weights."""

    def __init__(self) -> None:
        with np.errstate(all="ignore"):
            self.llm = models.llm(check_nan=True)
        self.good = self.llm.params
        self.bytes = models.digest(self.good)
        self.tensors = split(llama, tiny.model_and_params()[0], self.good)

    def case(self, rng: random.Random) -> Case:
        with np.errstate(all="ignore"):
            return rng.choice((self._params, self._tensors, self._tensors, self._else))(rng)

    def _params(self, rng: random.Random) -> Case:
        leaves, tree = jax.tree.flatten(self.good)
        i, good = rng.randrange(len(leaves)), None
        leaves[i], good = _array(rng, leaves[i])
        good = None if isinstance(leaves[i], np.ndarray | jax.Array) and good is False else good
        try:
            new = jax.tree.unflatten(tree, leaves)
        except Exception:
            new = leaves
        told = in_words("update_params", dict(leaf=leaves[i]))
        return Case(lambda: self.llm.update_params(new), ("params",), good, told)

    def _tensors(self, rng: random.Random) -> Case:
        name = rng.choice(list(self.tensors))
        value, good = _array(rng, self.tensors[name])
        pairs: Any = {name: value}
        wrong = rng.random()
        if wrong < 0.1:
            other = rng.choice(("", "no.such.weight", 3, None, name.upper(), name + " ", b"a"))
            pairs, good, name = {other: self.tensors[name]}, False, rf"{other!r}|name|tensors"
        elif wrong < 0.15:
            pairs, good = [(name, value), (name, self.tensors[name])], None
        elif wrong < 0.2:
            pairs = rng.choice(([(name,)], [name], [(name, value, 1)], [None], {}, []))
            good = False if pairs else None  # nothing may be what changes
        call, told = rng.choice(
            ((self._updated, "update_weights"), (self.llm.reload_weights, "reload"))
        )
        fields = (name, "tensors", "source", "weights")
        return Case(lambda: call(pairs), fields, good, in_words(told, dict(tensors=pairs)))

    def _else(self, rng: random.Random) -> Case:
        value = values.draw(rng)
        # Nothing at all may be what changes.
        good = None if isinstance(value, str | Path | type(None)) or empty(value) is None else False
        name = rng.choice(("update_params", "update_weights", "reload_weights"))
        call = self._updated if name == "update_weights" else getattr(self.llm, name)
        fields = ("params", "tensors", "source", "model", "weights", "array")
        return Case(lambda: call(value), fields, good, in_words(name, dict(value=value)))

    def _updated(self, tensors: Any) -> None:
        self.llm.start_weight_update()
        self.llm.update_weights(tensors)
        self.llm.finish_weight_update()

    def status(self) -> Any:
        return self.llm.weights_version, id(self.llm.params), self.llm.engine.worker._staged is None

    def mend(self) -> None:
        if self.llm.params is not self.good:
            self.llm.update_params(self.good)
        self.llm.engine.worker._staged = None

    def canary(self) -> Iterator[Any]:
        # New weights are taken by requests at work, so one of these lives from case to case.
        *_, told = models.streamed(self.llm)
        yield told, models.digest(self.llm.params) == self.bytes

    def close(self) -> None:
        self.llm.close()


PLACE = Kind(
    lambda v: None if isinstance(v, str | Path) else False,
    (None, 3, b"a", [], "", "/", "\0", "/dev/null/x", r"/proc/none\w*", "File name too long", True),
)
OVERRIDES = Kind(
    lambda v: None if isinstance(v, dict) else False,
    ({"a": 1}, {"load_config": 3}, {"load_config": {"load_format": 3}}, {"model_config": []},
     {"model_config": {"model": 3}}, {"model_config": {"revision": 3}}, {1: {}}, [], "ab",
     {"engine_config": {"async_depth": 0}}, {"engine_config": {"num_decode_steps": 4}},
     {"engine_config": {"async_depth": "2"}}, {"engine_config": {"num_blocks": 3}},
     {"engine_config": {"async_depth": True}}, {"load_config": {"seed": 1}},
     {"load_config": {"load_format": "auto", "model_loader_extra_config": 3}}),
)  # fmt: skip
SLEEPERS = Kind(
    lambda v: False if isinstance(v, str | int | float | bytes) else None,
    (["none"], "weights", [3], 3, [[]], ["weights", "kv"], [None], {"kv_cache"}),
)
PATTERN = Kind(
    lambda v: True if v is None else None if isinstance(v, str) else False,
    ("a", "{part}", "../{part}.safetensors", "{0}.safetensors", "{part!r}.safetensors",
     "{part:>99999}.safetensors", "{part.real}.safetensors", "{rank}.safetensors", 3,
     "\0{part}.safetensors"),
)  # fmt: skip


class Settings(Entry):
    """Sleep, folders, records and settings."""

    def __init__(self) -> None:
        self.llm = models.llm()
        self.config = self.llm.engine.config, self.llm.load_config

    def case(self, rng: random.Random) -> Case:
        self.folder = models.scratch() / str(next(NAMES))
        made = calls.case(rng, self._targets())
        return made._replace(fields=(*made.fields, *ALSO))

    def _targets(self) -> tuple[Target, ...]:
        llm, folder = self.llm, self.folder
        files = dict(path=str(folder))
        return (
            Target("sleep", self._slept, dict(level=one_of(1, 2))),
            Target("wake_up", llm.wake_up, dict(tags=SLEEPERS)),
            Target("wake_up", self._woken, dict(tags=SLEEPERS)),
            Target("update_config", llm.update_config, dict(overrides=OVERRIDES)),
            Target("save_params", llm.save_params, dict(folder=PLACE)),
            Target("load_params", llm.load_params, dict(folder=PLACE)),
            Target("save_sharded_state", llm.save_sharded_state,
                   dict(path=PLACE, pattern=PATTERN, max_size=size(1, 2**30, 2**62, None)),
                   lambda: files),
            Target("save_state", llm.save_state, dict(folder=PLACE)),
            Target("restore_state", lambda **f: list(llm.restore_state(**f)), dict(folder=PLACE)),
            Target("start_profile", llm.start_profile, dict(folder=PLACE)),
            Target("profile", llm.profile, dict(
                is_start=Kind(lambda v: None if v is True else flag().good(v), flag().near),
                profile_prefix=PLACE._replace(good=lambda v: v is None or PLACE.good(v)))),
            Target("check_health", llm.check_health, dict(timeout_s=real(1e-3, 1e6))),
            Target("generate", lambda **f: llm.generate("A", models.PARAMS, **f),
                   dict(no_such=anything())),
        )  # fmt: skip

    def _slept(self, **fields: Any) -> None:
        self.llm.sleep(**fields)

    def _woken(self, **fields: Any) -> None:
        self.llm.sleep()
        try:
            self.llm.wake_up(**fields)
        finally:
            self.mend()

    def status(self) -> Any:
        engine = self.llm.engine
        return (
            engine.config == self.config[0], self.llm.load_config == self.config[1],
            self.llm.is_sleeping(), self.llm.runner.profiler.folder, self.llm.weights_version,
        )  # fmt: skip

    def mend(self) -> None:
        llm = self.llm
        if llm.runner.profiler.folder is not None:
            llm.stop_profile()
        if llm.is_sleeping():
            llm.wake_up()
        if llm.is_sleeping():
            llm.reload_weights()
        llm.engine.config, llm.engine.worker.load_config = self.config
        shutil.rmtree(self.folder, ignore_errors=True)

    def canary(self) -> Iterator[Any]:
        *_, told = models.streamed(self.llm)
        yield told

    def close(self) -> None:
        self.llm.close()


ALSO = (
    "folder", "path", "tags", "level", "requests are at work", "sleep", "records", "profile",
    "profile_prefix", "overrides", "load_config", "model_config", "engine_config", "async_depth",
    "num_decode_steps", "is_start", "a profile", "pattern", "no_such",
    "model", "revision", "load_format", "model_loader_extra_config", "/dev/null",
    r"/proc/none\w*", "File name too long", r"[./] holds no",
)  # fmt: skip
