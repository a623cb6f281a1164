"""Executables that a second start loads."""

import errno
import functools
import importlib.resources
from pathlib import Path
import resource
import shutil
from typing import Any, cast

import jax
import pytest

import jaxrunner
from jaxrunner.device import lowering
from jaxrunner.device.program_spec import program_keys
from jaxrunner.engine.engine import Engine
from jaxrunner.models.llama import llama
from jaxrunner.programs import program_cache
from jaxrunner.programs.program_cache import SUFFIX, ProgramCache, find_folder
from jaxrunner.programs.program_table import LOADED
from jaxrunner.sampling import RULES
from jaxrunner.sampling.custom import with_logits_fn
from jaxrunner.sampling.min_p import min_p
from jaxrunner.slot_table import SlotTable
from jaxrunner.speculators.ngram import ngram
from tests.support import tiny
from tests.support.kept_programs import make, no_cache_of_jax, reasons
from tests.support.tiny_engine import PROMPTS, params_of, run

__all__ = ["no_cache_of_jax"]  # a fixture of every test here
PARAMS = [params_of("sampled", i) for i in range(len(PROMPTS))]


@functools.cache
def wanted() -> list[list[int]]:
    """Returns the tokens of an engine that keeps no programs."""
    return run(make(None), PROMPTS, PARAMS)


def start(folder: Path) -> Engine:
    """Returns an engine that has compiled or loaded what usual requests need."""
    engine = make(folder)
    engine.warm_up()
    return engine


def cache_of(engine: Engine) -> ProgramCache | None:
    return engine.runner.programs._cache


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def test_a_second_start_compiles_nothing(tmp_path):
    first = start(tmp_path)
    assert (reasons(first), len(files(tmp_path))) == (
        {"warm-up"}, len(first.runner.programs.ledger)
    )  # fmt: skip
    second = start(tmp_path)
    assert reasons(second) == {LOADED}
    for engine in (first, second):  # among others with programs that warm-up leaves out
        assert run(engine, PROMPTS, PARAMS) == wanted()
    assert reasons(first) - {"warm-up"} and len(files(tmp_path)) > len(second.pools)
    third = start(tmp_path)
    run(third, PROMPTS, PARAMS)
    assert reasons(third) == {LOADED}


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Path:
    """Returns a folder in which an engine has kept its programs."""
    folder = tmp_path_factory.mktemp("started")
    start(folder)
    return folder


def test_a_file_that_is_not_whole_is_ignored(tmp_path, started):
    shutil.copytree(started, tmp_path, dirs_exist_ok=True)
    spoilt = files(tmp_path)[:3]
    for path, data in zip(spoilt, (spoilt[0].read_bytes()[:-9], b"", b"?" * 99), strict=True):
        path.write_bytes(data)
    with pytest.warns(UserWarning) as told:
        engine = start(tmp_path)
    words = [next(str(w.message) for w in told if path.name in str(w.message)) for path in spoilt]
    assert all("is ignored: ValueError: its digest is not" in word for word in words)
    found = [compilation.reason for compilation in engine.runner.programs.ledger]
    assert found.count("warm-up") == 3 and {*found} == {"warm-up", LOADED}
    assert run(engine, PROMPTS, PARAMS) == wanted()
    assert reasons(start(tmp_path)) == {LOADED}  # it was written again


@pytest.mark.parametrize("changes", [dict(max_num_seqs=4), dict(nan_policy="ignore")])
def test_another_engine_has_its_own(tmp_path, changes):
    one, same, other = make(tmp_path), make(tmp_path), make(tmp_path, **changes)
    paths = [cache._path("key") for e in (one, same, other) if (cache := cache_of(e))]
    assert paths[0] == paths[1] != paths[2]


def test_other_code_has_its_own(tmp_path, monkeypatch):
    path = ProgramCache(tmp_path, [])._path("key")
    monkeypatch.setattr(program_cache, "_surroundings", lambda: ("a new version",))
    assert ProgramCache(tmp_path, [])._path("key") != path


def test_every_file_of_the_package_is_part_of_a_name(tmp_path, monkeypatch):
    package = tmp_path / "jaxrunner"
    shutil.copytree(jaxrunner.__path__[0], package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(importlib.resources, "files", lambda name: tmp_path / name)
    program_cache._surroundings.cache_clear()
    names = {ProgramCache(tmp_path, [])._path("key")}
    for file in (
        "step.py",
        "models/llama.py",
        "kernels_pallas/sampling/sampler.py",
        "sampling/gumbel.py",
    ):
        with (package / file).open("a") as code:
            code.write("# changed\n")
        program_cache._surroundings.cache_clear()
        names.add(ProgramCache(tmp_path, [])._path("key"))
    program_cache._surroundings.cache_clear()
    assert len(names) == 5


def test_code_of_others_is_not_kept(tmp_path):
    def layers(*args):
        return llama.layers(*args)

    assert cache_of(make(tmp_path)) is not None
    assert cache_of(make(tmp_path, model=llama._replace(layers=layers))) is None
    assert cache_of(make(tmp_path, model=llama._replace(logits=layers))) is None
    rules = with_logits_fn(RULES, lambda logits, row: logits)
    assert cache_of(make(tmp_path, rules=rules)) is None


def test_tables_of_other_names_and_sizes_have_their_own(tmp_path):
    """They are laid out in the order of their names."""
    params = min_p.params, lambda request: None
    tables = [SlotTable(name, *params, dims=dims) for name in "az" for dims in ((), (("own", 3),))]
    models = [llama, *(llama._replace(tables=(table,)) for table in tables)]
    caches = [cache_of(make(tmp_path, model=model)) for model in models]
    assert len({cache._path("key") for cache in caches if cache is not None}) == 5


def test_other_drafts_have_their_own(tmp_path):
    """Other lengths of n-grams are compiled in, as is how drafts are verified."""
    drafters = [
        ngram(2, max_n=3), ngram(3, max_n=3), ngram(2, max_n=4),
        ngram(2, max_n=3)._replace(rejection="standard"), ngram(2, max_n=3),
    ]  # fmt: skip
    models = [llama, *(llama._replace(speculator=drafter) for drafter in drafters)]
    caches = [cache_of(make(tmp_path, model=model)) for model in models]
    assert len({cache._path("key") for cache in caches if cache is not None}) == 5
    mine = llama._replace(speculator=drafters[0]._replace(propose=lambda inputs: inputs))
    assert cache_of(make(tmp_path, model=mine)) is None


def test_nothing_is_kept_where_jax_keeps_its_own(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    try:
        assert cache_of(make(tmp_path)) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def full_disk():
    """Lets no file of this process grow: what writes more fails in the midst of it."""
    if jax.default_backend() == "gpu":
        pytest.skip("XLA writes files while it compiles for a GPU")
    wanted()  # compiled before, as compilers write files too
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("begin", [start, make], ids=["at the start", "in a step"])
def test_a_full_disk_is_a_note(tmp_path, full_disk, begin):
    want = wanted()
    with pytest.warns(UserWarning, match="are not kept in .*File too large") as told:
        engine = begin(tmp_path)
        assert run(engine, PROMPTS, PARAMS) == want
    assert not list(tmp_path.iterdir())
    assert begin is start or len(told) == 1  # at the start several threads write at once


def test_what_was_not_written_whole_is_removed(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    cache = ProgramCache(tmp_path, [])
    with pytest.raises(OSError, match="No space left"):
        cache._write(cache._path("key"), b"data")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_read_is_a_note(tmp_path):
    cache = ProgramCache(tmp_path, [])
    cache._path("key").mkdir()
    with pytest.warns(UserWarning, match="cannot be read"):
        assert cache.load("key", (), 0) is None


def test_the_folder_stays_small(tmp_path):
    engine = start(tmp_path)
    size = max(path.stat().st_size for path in files(tmp_path))
    cache = ProgramCache(tmp_path, [], max_bytes=3 * size)
    table, kept = engine.runner.programs._table, cache_of(engine)
    assert kept is not None
    key = max(table, key=lambda key: kept._path(key).stat().st_size)
    executable = table[key]
    spec = engine.runner.programs._spec(key)
    for i in range(6):
        cache.save((key, i), executable)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 3 * size
    assert cache.load((key, 5), spec.args, spec.out) is not None
    assert cache.load((key, 0), spec.args, spec.out) is None


def test_a_file_that_another_process_removes_is_passed_over(tmp_path):
    (tmp_path / f"gone{SUFFIX}").symlink_to(tmp_path / "nowhere")
    cache = ProgramCache(tmp_path, [])
    cache._write(cache._path("key"), b"data")
    assert cache._path("key").read_bytes() == b"data"


def test_folders_by_name(tmp_path):
    assert find_folder(None) is None
    assert find_folder(str(tmp_path)) == tmp_path
    with pytest.raises(TypeError, match="cache_dir must be a folder, 'auto' or None, got 3"):
        find_folder(cast(Any, 3))


def test_executables_have_the_structure_that_is_said(whole):
    """Each has that of what it is compiled from."""
    config = tiny.config(num_hidden_layers=1)
    engine = Engine(llama, config, tiny.engine_config(), tiny.random_params(config))
    keys = program_keys(engine.runner.program, engine.runner.buckets, all_rules=True)
    for key in keys:
        spec = engine.runner.programs._spec(key)
        lowered = lowering.lower(spec)._lowered
        executables = [lowered.compile()] if key.name == "admit" else []
        for one in (lowered, *executables):
            assert one.in_tree == jax.tree.structure((spec.args, {})), key
            assert one.out_tree == jax.tree.structure(spec.out), key
    assert len(keys) > 10 and "admit" in {key.name for key in keys}


def test_every_program_has_a_file_of_its_own(tmp_path):
    engine, cache = make(tmp_path), ProgramCache(tmp_path, ())
    keys = program_keys(engine.runner.program, engine.runner.buckets, all_rules=True)
    assert len({cache._path(key) for key in keys}) == len(set(keys)) > 10
