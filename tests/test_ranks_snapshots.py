"""Requests at work over data ranks, saved and taken up again: their tokens stay the same."""

from collections.abc import Iterable
import json
from pathlib import Path
import shutil
from typing import Any

import numpy as np
import pytest

from jaxrunner.engine.engine import Engine
from jaxrunner.engine.snapshots.snapshot import owners_of, restore_engine, save_engine
from jaxrunner.loading import checksums
from jaxrunner.scheduling.ranks import RankedScheduler
from jaxrunner.scheduling.request import Request
from jaxrunner.scheduling.scheduler import Scheduler
from tests.support import small_checkpoint
from tests.support.crowd import answers, logprobs, requests
from tests.support.data_ranks import MIXTURE, D, engine

Ends = dict[str, tuple[list[int], list[float], int]]
NOT_SAVED = dict(
    ranks="adaptive num_drafts ranks router", router="_block_size _margin _num_blocks",
    slots_of_ranks="_none _num_slots _where tables",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return small_checkpoint.save_family(tmp_path_factory.mktemp("mixture"), MIXTURE)


@pytest.fixture(scope="module")
def begun(folder, tmp_path_factory) -> tuple[Engine, Path, Ends]:
    """Returns an engine, where it was saved at work, and what requests got that went on."""
    e, saved = engine(folder, 1, num_blocks=14), tmp_path_factory.mktemp("snapshot") / "saved"
    made = [e.add(f"{i}", *one, eos_token_ids=[60]) for i, one in enumerate(requests(1))]
    for _ in range(9):
        e.step()
    save_engine(e, saved)
    live = [r for r in made if r.finish_reason is None]
    assert isinstance(e.scheduler, RankedScheduler) and e.scheduler.num_preemptions
    assert all(rank.num_running and rank.num_waiting for rank in e.scheduler.ranks)
    assert len(live) < len(made) and any(r.output_token_ids for r in live)
    return e, saved, ends(e, live)


def ends(e: Engine, of: Iterable[Request]) -> Ends:
    """Returns what requests end with: tokens, logprobs, and how many tokens were cached."""
    while e.has_unfinished:
        e.step()
    return {r.request_id: (r.output_token_ids, logprobs(r), r.num_cached_tokens) for r in of}


@pytest.mark.slow
@pytest.mark.devices(D)
def test_requests_go_on_where_they_were_saved(begun):
    """After others, whose keys lie where those of the saved ones were."""
    e, saved, want = begun
    answers(e, 2)
    e.reset_prefix_cache()
    assert ends(e, restore_engine(e, saved).requests.values()) == want
    assert e.scheduler.router.work == [0] * D and e.runner.requests.num_taken <= 2 * D
    assert all(sum(map(pool.is_published, range(14))) for pool in e.pools)


@pytest.mark.slow
@pytest.mark.devices(2 * D)
def test_they_go_on_with_other_devices_a_rank(begun, folder):
    _, saved, want = begun
    e = engine(folder, 2, num_blocks=14)
    got = ends(e, restore_engine(e, saved).requests.values())
    assert got.keys() == want.keys()
    for name, (tokens, values, num_cached) in want.items():
        assert (tokens, num_cached) == got[name][::2]
        np.testing.assert_allclose(got[name][1], values, atol=2e-3)


def forged(saved: Path, folder: Path, name: str, change: Any) -> Path:
    """Writes a snapshot that says something else of how requests are dealt out."""
    shutil.copytree(saved, folder)
    told = json.loads((folder / "host.json").read_text())
    host = dict(told["root"]["dict"])["host"]
    (entry,) = [entry for entry in host[1]["dict"] if entry[0] == name]
    entry[1] = change
    (folder / "host.json").write_text(json.dumps(told))
    (folder / checksums.NAME).unlink()
    checksums.write(folder)
    return folder


@pytest.mark.slow
@pytest.mark.devices(D)
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("ranks._rank", {"dict": []}, "requests on other ranks"),
        ("slots_of_ranks._rank", {"dict": [["0", 1]]}, "slots on other ranks"),
        ("router.work", [1] * D, "another sum of work"),
        ("router._left", {"dict": [["0", {"tuple": [0, 1]}]]}, "work of others"),
        ("router._known", {"OrderedDict": [[{"bytes": "00"}, 2**D]]}, "prompts on no rank"),
    ],
)
def test_ranks_that_cannot_be_are_named(name, change, words, begun, tmp_path):
    e, saved, _ = begun
    with pytest.raises(ValueError, match=f"has ranks that cannot be: ValueError: {words}: save it"):
        restore_engine(e, forged(saved, tmp_path / "forged", name, change))
    assert not e.has_unfinished


@pytest.mark.slow
@pytest.mark.devices(D)
def test_each_attribute_is_saved_or_known_not_to_be(begun):
    _, dealing, *_ = owners_of(begun[0])
    for name, attributes in NOT_SAVED.items():
        owner = dealing[name]
        assert {*vars(owner)} == {*attributes.split(), *owner.SAVED}


@pytest.mark.slow
@pytest.mark.devices(D)
def test_they_go_on_on_another_number_of_ranks(begun, folder, tmp_path):
    """On one device, and from there, in the midst again, on three ranks."""
    e, saved, want = begun
    one = engine(folder, num_blocks=14)
    taken = restore_engine(one, saved).requests
    for _ in range(8):
        one.step()
    save_engine(one, tmp_path / "saved")
    assert isinstance(one.scheduler, Scheduler) and one.scheduler.num_waiting > 1
    ran = [request.request_id for request in one.scheduler.running]
    on_one = ends(one, taken.values())
    again = ends(e, restore_engine(e, tmp_path / "saved").requests.values())
    assert len(again) < len(on_one) and on_one.keys() == want.keys()
    for name, (tokens, values, _) in (on_one | again).items():
        assert tokens == want[name][0]
        np.testing.assert_allclose(values, want[name][1], atol=2e-3)
    assert ran and all(again[name][2] == on_one[name][2] for name in ran)
