"""What has changed since it was saved is refused by name."""

from collections.abc import Callable
import json
from pathlib import Path
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrunner.loading import checkpoint, checksums, orbax_io, safetensors_file
from jaxrunner.loading.safetensors_file import read_header
from tests.support.checkpoints import Q1, load, random_params, split, tiny, write, write_raw

TREE = {"a": jnp.arange(3000.0), "b": [jnp.ones((2, 700)), jnp.zeros((), jnp.int32)]}
LIKE = orbax_io.abstract(TREE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checksums") / "saved"
    orbax_io.save(folder, TREE)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


TAMPERINGS: dict[str, Callable[[Path], object]] = {
    "a bit": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "emptied": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS.keys())
def test_no_file_of_saved_arrays_can_change(tamper, saved: Path, tmp_path: Path):
    names = [path.relative_to(saved) for path in files_of(saved)]
    assert len(names) > 4 and Path(checksums.NAME) in names
    for i, name in enumerate(names):
        folder = tmp_path / str(i)
        shutil.copytree(saved, folder)
        tamper(folder / name)
        if name == Path(checksums.NAME) and not (folder / name).is_file():
            continue  # as another program would have written it
        with pytest.raises(ValueError, match=rf"{folder}.* (has changed|is missing|not saved)"):
            orbax_io.restore(folder, LIKE)


def test_what_was_added_is_named_and_hidden_files_do_not_count(saved: Path, tmp_path: Path):
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    (folder / ".DS_Store").write_bytes(b"of a desktop")
    jax.tree.map(np.testing.assert_array_equal, orbax_io.restore(folder, LIKE), TREE)
    (folder / "d" / "more").write_bytes(b"")
    with pytest.raises(ValueError, match="d/more was not saved with the others: remove it"):
        orbax_io.restore(folder, LIKE)


def test_checksums_that_are_none_are_refused(saved: Path, tmp_path: Path):
    folder = tmp_path / "saved"
    shutil.copytree(saved, folder)
    for text, match in [("{", "has changed, it is not JSON"), ("[1]", "changed, it holds no obj")]:
        (folder / checksums.NAME).write_text(text)
        with pytest.raises(ValueError, match=match):
            orbax_io.restore(folder, LIKE)
    (folder / checksums.NAME).unlink()
    with pytest.raises(ValueError, match=r"has no jaxrunner-checksums.json, so nothing in it can"):
        checksums.check(folder, required=True)


def test_arrays_without_checksums_are_taken_and_what_cannot_be_read_is_named(
    tmp_path: Path,
):
    folder, tree = tmp_path / "saved", {"a": TREE["a"]}
    like = orbax_io.abstract(tree)  # one alone: orbax waits for no second once one has failed
    orbax_io.save(folder, tree)
    (folder / checksums.NAME).unlink()  # as another program writes it
    jax.tree.map(np.testing.assert_array_equal, orbax_io.restore(folder, like), tree)
    max(files_of(folder), key=lambda path: path.stat().st_size).write_bytes(b"")
    with pytest.raises(ValueError, match="saved cannot be read as orbax's: "):
        orbax_io.restore(folder, like)
    (folder / "_METADATA").write_bytes(b"{}")
    with pytest.raises(ValueError, match="saved holds no arrays of orbax: "):
        orbax_io.restore(folder, like)
    for path in files_of(folder):
        path.unlink()
    with pytest.raises(ValueError, match="holds no arrays of orbax, or its metadata are broken"):
        orbax_io.restore(folder, like)


def entries_of(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def test_no_bit_of_a_safetensors_file_of_ours_changes_weights(tmp_path: Path):
    model, config, _ = tiny()
    params = random_params(model, config)
    path = tmp_path / checkpoint.WHOLE
    write(path, split(model, config, params))
    data, rng = path.read_bytes(), np.random.default_rng(0)
    size = int.from_bytes(data[:8], "little")
    places = [*rng.integers(0, 8 + size, 60), *rng.integers(8 + size, len(data), 40)]
    refused = 0
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << rng.integers(8)
        path.write_bytes(changed)
        try:
            got = load(tmp_path, model, config)
        except ValueError as error:
            assert str(tmp_path) in str(error)
            refused += 1
        else:  # a letter that nobody reads
            jax.tree.map(np.testing.assert_array_equal, got, params)
    assert refused > 90


def test_tensors_that_change_places_are_seen(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    ones = np.ones(3, np.float32)
    write(path, {"a": ones, "b": 2 * ones, "c": ones.view(np.int32)})
    entries, data = entries_of(path), path.read_bytes()[-36:]

    def values(header: dict) -> list[np.ndarray]:
        write_raw(path, header, data)
        return [safetensors_file.read(path, n, x) for n, x in read_header(path).items()]

    assert [x[0] for x in values(entries)[:2]] == [1, 2]
    swapped = entries | {"a": entries["b"], "b": entries["a"]}
    for header in (swapped, entries | {"c": entries["c"] | {"dtype": "F32"}}):
        with pytest.raises(ValueError, match=r"x\.safetensors: . has changed since it was saved"):
            values(header)
    entries["__metadata__"].pop("sha256:b")
    with pytest.raises(ValueError, match="tensors and checksums differ in 'b': save it again"):
        values(entries)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path, monkeypatch):
    model, config, _ = tiny()
    write(tmp_path / checkpoint.WHOLE, split(model, config, random_params(model, config)))
    find = checkpoint.find

    def and_cut(folder, *args, **kwargs):
        found = find(folder, *args, **kwargs)
        path, tensor = found[Q1]
        path.write_bytes(path.read_bytes()[: tensor.start + 8])
        return found

    monkeypatch.setattr(checkpoint, "find", and_cut)
    match = r"model\.safetensors: model\..* ends after \d+ of \d+ bytes, the file has become short"
    with pytest.raises(ValueError, match=match):
        load(tmp_path, model, config)
