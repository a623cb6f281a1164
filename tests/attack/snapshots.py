"""Snapshots of an engine, and weights in folders of ours, that were tampered with."""

from collections.abc import Iterator
import random
import shutil
from typing import Any

from jaxrunner import LLM
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from tests.attack import models, tamper
from tests.attack.harness import Case, Entry, Harm
from tests.attack.tamper import Folder

FIELDS = (r"host\.json", "saved", "snapshot", "folder", "layer[0-9]", "tables", "checksum")


class Snapshots(Entry):
    """`restore_engine`: what is restored goes on with the same tokens, or nothing changes."""

    def __init__(self) -> None:
        self.engine, other = models.engine(), models.engine()
        path = models.scratch() / "snapshot"
        shutil.rmtree(path, ignore_errors=True)
        *_, _ = models.neighbour(other, "before")
        self.begun = [
            other.add(name, list(range(n)), models.PARAMS) for name, n in (("a", 3), ("b", 9))
        ]
        other.add("c", list(range(9)), models.PARAMS, prefix_from=self.begun[1])
        for _ in range(3):
            other.step()
        save_engine(other, path, dict(more=1))
        while other.has_unfinished:
            other.step()
        self.want = {r.request_id: r.output_token_ids for r in self.begun}
        other.close()
        self.folder = Folder(path)

    def case(self, rng: random.Random) -> Case:
        host = self.folder.path / "host.json"
        if rng.random() < 0.5:
            new, words = tamper.json_text(rng, self.folder.files[host])
            self.folder.write(host, new)
            words = f"host.json: {words}"
        else:
            words = self.folder.tamper(rng)
        return Case(self._restored, (str(self.folder.path), *FIELDS), None, words)

    def _restored(self) -> None:
        """Takes up the requests; what is taken ends as it would have, and can be ended."""
        restored, _ = restore_engine(self.engine, self.folder.path)
        for _ in range(60):
            self.engine.step()
        got = {name: restored[name].output_token_ids for name in self.want if name in restored}
        if self.engine.has_unfinished:
            raise Harm("restored requests never end")
        if got != self.want:
            raise Harm(f"other tokens: {got}")

    def status(self) -> Any:
        engine = self.engine
        return len(engine.unfinished), engine.status.ended

    def mend(self) -> None:
        self.folder.mend()
        self.engine.abort(list(self.engine.unfinished))
        while self.engine.step():
            pass
        assert not self.engine.has_unfinished, "what was restored cannot be aborted"
        self.engine.reset_prefix_cache()
        assert all(pool.num_free == 60 for pool in self.engine.pools), "blocks are lost"

    def canary(self) -> Iterator[Any]:
        *_, told = models.neighbour(self.engine)  # nothing is restored beside a request
        yield told

    def close(self) -> None:
        self.engine.close()


class Weights(Entry):
    """`load_params`, and `LLM(load_format="sharded_state")`: the weights as saved, or a refusal."""

    def __init__(self) -> None:
        self.llm = models.llm()
        self.bytes = models.digest(self.llm.params)
        path = models.scratch() / "weights"
        shutil.rmtree(path, ignore_errors=True)
        self.llm.save_params(path / "params")
        shutil.copytree(models.checkpoint(), path / "sharded")
        (path / "sharded" / "model.safetensors").unlink()
        self.llm.save_sharded_state(path / "sharded", max_size=5000)
        self.params, self.sharded = Folder(path / "params"), Folder(path / "sharded")

    def case(self, rng: random.Random) -> Case:
        folder, call = rng.choice(((self.params, self._loaded), (self.sharded, self._opened)))
        words = folder.tamper(rng, lambda path: path.name not in models.FILES)
        fields = (str(folder.path), "checksum", *FIELDS)
        return Case(call, fields, None, f"{folder.path.name}: {words}")

    def _loaded(self) -> None:
        try:
            self.llm.load_params(self.params.path)
            self._check(self.llm.params)
        finally:
            if models.digest(self.llm.params) != self.bytes:
                self.llm.reload_weights(models.checkpoint())

    def _opened(self) -> None:
        sizes: dict[str, Any] = models.SIZES | dict(
            load_format="sharded_state", skip_tokenizer_init=True
        )
        with LLM(str(self.sharded.path), **sizes) as llm:
            self._check(llm.params)

    def _check(self, params: Any) -> None:
        if models.digest(params) != self.bytes:
            raise Harm("other weights were loaded")

    def status(self) -> Any:
        return self.llm.weights_version, models.digest(self.llm.params) == self.bytes

    def mend(self) -> None:
        self.params.mend()
        self.sharded.mend()

    def canary(self) -> Iterator[Any]:
        *_, told = models.streamed(self.llm)
        yield told

    def close(self) -> None:
        self.llm.close()
