"""A snapshot that was changed is refused by name, or harms nobody: the engine goes on."""

import json
from pathlib import Path
import shutil
from typing import Any

import numpy as np
import pytest

from jaxrunner.api.sampling_params import SamplingParams
from jaxrunner.engine.completions import Completions
from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import restore_engine, save_engine
from jaxrunner.loading import checksums
from jaxrunner.text.prompts import parse_prompts
from tests.support.tiny_engine import PROMPTS, begin, drain, engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
MOST_STEPS = 300
NONSENSE: list[Any] = [
    None, True, -1, 0, 1, 7, 10**6, 2**63, 1.5, "", "x", [], [[]], {}, {"tuple": [1]},
    {"Request": 0}, {"Request": 99}, {"Status": "running"}, {"Status": "none"}, {"set": ["a"]},
    {"bytes": "zz"}, {"ndarray": ["float32", [2], ""]}, {"SamplingParams": {}}, {"a": 1, "b": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> tuple[Engine, Path]:
    """Returns an engine, idle again, and the folder that it was saved in at work."""
    e, folder = engine(num_blocks=14), tmp_path_factory.mktemp("snapshot") / "saved"
    begin(e, steps=8)
    assert e.scheduler.num_preemptions and e.scheduler.num_waiting
    save_engine(e, folder, more={"of": "its user"})
    e.abort(list(e.scheduler.requests))
    drain(e)
    return e, folder


def canary(e: Engine) -> list[int]:
    request = e.add("canary", PROMPTS[1], GREEDY)
    drain(e)
    return request.output_token_ids


def test_a_file_that_has_changed_is_named_and_the_engine_goes_on(begun, tmp_path: Path):
    e, saved = begun
    want = canary(e)
    e.add("ended", PROMPTS[1], GREEDY)
    e.step()
    e.abort(["ended"])
    taken = e.runner.requests.num_taken
    assert taken == 1 and not e.has_unfinished  # until the next step
    for i, path in enumerate(sorted(p for p in saved.rglob("*") if p.is_file())):
        shutil.copytree(saved, tmp_path / str(i))
        changed = tmp_path / str(i) / path.relative_to(saved)
        data = bytearray(changed.read_bytes())
        data[len(data) // 2] ^= 4
        changed.write_bytes(data)
        with pytest.raises(ValueError, match=f"{tmp_path / str(i)}"):
            restore_engine(e, tmp_path / str(i))
        assert not e.has_unfinished and e.runner.requests.num_taken == taken
    assert canary(e) == want
    shutil.copytree(saved, tmp_path / "bare")
    (tmp_path / "bare" / checksums.NAME).unlink()
    with pytest.raises(ValueError, match="so nothing in it can be trusted"):
        restore_engine(e, tmp_path / "bare")


def places(value: Any) -> list[tuple[Any, Any]]:
    """Returns what holds each value within a JSON value, and its key there."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    inner = [value[key] for key in keys if isinstance(value[key], dict | list)]
    return found + [place for part in inner for place in places(part)]


def forge(saved: Path, folder: Path, rng: np.random.Generator) -> str:
    """Writes a snapshot with one value changed, and checksums that are right."""
    shutil.copytree(saved, folder)
    told = json.loads((folder / "host.json").read_text())
    found = places(told)
    holder, key = found[rng.integers(len(found))]
    old, holder[key] = holder[key], NONSENSE[rng.integers(len(NONSENSE))]
    (folder / "host.json").write_text(json.dumps(told))
    (folder / checksums.NAME).unlink()
    checksums.write(folder)
    return f"{key}: {old!r:.60} -> {holder[key]!r}"


@pytest.mark.parametrize("seed", range(2))
def test_what_was_forged_is_refused_or_can_run_and_be_aborted(begun, seed: int, tmp_path: Path):
    """Forged: one value is another, and the checksums say that it should be."""
    (e, saved), rng = begun, np.random.default_rng(seed)
    want = canary(e)
    for i in range(20):
        folder = tmp_path / str(i)
        change = forge(saved, folder, rng)
        try:
            requests, _ = restore_engine(e, folder)
        except ValueError as error:
            assert str(error), change
        else:
            ends(e, requests, change, abort=bool(rng.integers(2)))
        assert not e.has_unfinished and canary(e) == want, change
        shutil.rmtree(folder)


def ends(e: Engine, requests: dict[str, Any], change: str, *, abort: bool) -> None:
    """Checks that what was restored comes to an end."""
    for _ in range(MOST_STEPS):
        if e.has_unfinished:
            e.step()
        if abort:
            e.abort(list(requests))
    assert not e.has_unfinished, change
    assert all(request.finish_reason for request in requests.values()), change
    [pool] = e.pools
    pool.check([])
    assert e.runner.requests.num_taken <= len(requests) and e.reset_prefix_cache(), change


FORGED = {
    "fields": ("worker.weights_version", "first"),
    "ranks": ("scheduler.requests", {"dict": []}),
    "queues": ("scheduler.running", []),
    "slots": ("slots._free", [0]),
    "blocks": ("pool0._num_refs", [0] * 14),
}


@pytest.mark.parametrize(("part", "change"), FORGED.items(), ids=FORGED.keys())
def test_what_cannot_be_is_named(part: str, change: tuple[str, Any], begun, tmp_path: Path):
    e, saved = begun
    shutil.copytree(saved, tmp_path / "forged")
    path = tmp_path / "forged" / "host.json"
    told = json.loads(path.read_text())
    host = dict(told["root"]["dict"])["host"]
    [entry] = [entry for part in host for entry in part["dict"] if entry[0] == change[0]]
    entry[1] = change[1]
    path.write_text(json.dumps(told))
    checksums.write(tmp_path / "forged")
    with pytest.raises(
        ValueError, match=f"the snapshot has {part} that cannot be: ValueError: .*: save it again"
    ):
        restore_engine(e, tmp_path / "forged")


def test_requests_on_no_rank_are_named(begun, tmp_path: Path):
    e, saved = begun
    shutil.copytree(saved, tmp_path / "forged")
    path = tmp_path / "forged" / "host.json"
    told = json.loads(path.read_text())
    dict(told["root"]["dict"])["host"].pop()
    path.write_text(json.dumps(told))
    checksums.write(tmp_path / "forged")
    with pytest.raises(ValueError, match="has ranks that cannot be: ValueError: there are none: s"):
        restore_engine(e, tmp_path / "forged")


def test_a_kind_that_host_json_does_not_know_is_named(begun, tmp_path: Path):
    e, saved = begun
    shutil.copytree(saved, tmp_path / "forged")
    for text in ("", "[]", "{}", '{"root": {}, "requests": []}', '{"root": [], "requests": [1]}'):
        (tmp_path / "forged" / "host.json").write_text(text)
        checksums.write(tmp_path / "forged")
        with pytest.raises(ValueError, match=r"host\.json is none that an engine wrote: "):
            restore_engine(e, tmp_path / "forged")


def test_completions_are_those_of_the_requests(begun, tmp_path: Path):
    e, saved = begun
    completions = Completions(e, None, ())
    with pytest.raises(ValueError, match="saved along with the engine cannot be taken up: KeyErr"):
        completions.restore(saved)
    prompts = parse_prompts([{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3, 4]}])
    for prompt in prompts:
        completions.add(prompt, GREEDY, into=[])
    completions.save(tmp_path / "saved")
    e.abort(["0", "1"])
    drain(e)
    for i, words in enumerate(["completions have other requests", "have not one completion each"]):
        shutil.copytree(tmp_path / "saved", tmp_path / str(i))
        path = tmp_path / str(i) / "host.json"
        told = json.loads(path.read_text())
        more = dict(dict(told["root"]["dict"])["more"]["dict"])
        if "other" in words:
            first, second = (dict(state["dict"]) for state in more["states"])
            first["request"].update(second["request"])
        else:
            more["states"].pop()
        path.write_text(json.dumps(told))
        checksums.write(tmp_path / str(i))
        with pytest.raises(ValueError, match=words):
            completions.restore(tmp_path / str(i))
    assert not e.has_unfinished
    groups = completions.restore(tmp_path / "saved")
    completions.run([state for group in groups for state in group])
    assert [len(group[0].token_ids) for group in groups] == [4, 4]
