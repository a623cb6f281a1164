"""Weights in files as they lie on the device, in vLLM's format: a start joins nothing."""

from collections.abc import Callable
from functools import partial
import glob
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrunner import pytree
from jaxrunner.api.validation import Bound, shown, validate
from jaxrunner.loading import safetensors_file
from jaxrunner.loading.weights import check_checkpoint, load_params
from jaxrunner.model import Source, Stored, StoredConfig
from jaxrunner.parallel.mesh import mesh_of
from jaxrunner.parallel.processes import host_copy, is_first, together
from jaxrunner.parallel.tensor import sources_on_mesh
from jaxrunner.parallel.whole import merge_one, whole_params

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
_MAX_SIZE = Bound(int, 1, 2**62, optional=True)


def save(
    folder: str | Path, config: StoredConfig, params: Any, *, pattern: str | None = None,
    max_size: int | None = None,
) -> None:  # fmt: skip
    """Writes params as safetensors files, of at most `max_size` bytes of weights each.

    Files of a mesh are those of one device, and any mesh reads them. Of several processes the first
    one writes them.

    A weight that is larger has a file of its own. pattern: the names of the files.

    Raises:
      TypeError, ValueError: a bad pattern or size, or such files are there.
    """
    folder, pattern, mesh = Path(folder), _checked(pattern), mesh_of(config)
    most = validate("max_size", max_size, _MAX_SIZE)
    together(mesh, lambda: _check_free(folder, pattern))
    leaves = {pytree.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    shapes = [leaf.shape for leaf in jax.tree.leaves(whole_params(type(params), config))]
    parts: list[dict[str, Any]] = [{}]
    for (name, leaf), shape in zip(leaves.items(), shapes, strict=True):
        size = sum(x.nbytes for x, _ in parts[-1].values())
        if parts[-1] and most is not None and size + leaf.nbytes > most:
            parts.append({})
        parts[-1][name] = leaf, shape
    for i, part in enumerate(parts):
        file = folder / pattern.format(rank=0, part=i)
        together(mesh, partial(_write, file, part, first=is_first(mesh)))


def _check_free(folder: Path, pattern: str) -> None:
    if old := _files(folder, pattern):
        raise ValueError(f"{folder} holds {old[0].name} already: name another folder")


def _write(file: Path, part: dict[str, Any], *, first: bool) -> None:
    """Writes weights, given with their shapes on one device, in the first process of a mesh; all
    take part in bringing them together."""
    tensors = {name: (leaf.dtype, shape) for name, (leaf, shape) in part.items()}
    arrays = (merge_one(host_copy(leaf), shape) for leaf, shape in part.values())
    try:
        if first:
            file.parent.mkdir(parents=True, exist_ok=True)
            safetensors_file.write(file, tensors, arrays)
    finally:
        for _ in arrays:  # the others wait for each
            pass


def load(
    folder: Path, model: Stored, config: StoredConfig, *, pattern: str | None = None, **kwargs: Any
) -> Any:
    """Returns the params that `save` wrote; `kwargs` are those of `load_params`.

    Raises:
      FileNotFoundError, TypeError, ValueError: as `load_params`, or a bad pattern.
    """
    model, files = _found(folder, model, pattern)
    return load_params(folder, model, config, files=files, **kwargs)


def check(folder: Path, model: Stored, config: StoredConfig, *, pattern: str | None = None) -> None:
    """Checks the headers of the files that `load` would read; raises as it."""
    model, files = _found(folder, model, pattern)
    check_checkpoint(folder, model, config, files)


class _AsHeld(NamedTuple):
    """A model whose weights are stored as they are held."""

    params: type
    sources: Callable[[StoredConfig], Any]
    spare: tuple[str, ...] = ()


def _found(folder: Path, model: Stored, pattern: str | None) -> tuple[Stored, list[Path]]:
    """Returns the model with weights stored as they are, and its files."""
    pattern = _checked(pattern)
    files = _files(folder, pattern)
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no {pattern.format(rank=0, part='*')}: save_sharded_state writes them"
        )
    held = _AsHeld(model.params, partial(_sources, model.params))
    return held._replace(sources=partial(sources_on_mesh, held)), files


def _files(folder: Path, pattern: str) -> list[Path]:
    name = glob.escape(pattern.format(rank=0, part="\n")).replace("\n", "*")
    return sorted(folder.glob(name))


def _checked(pattern: str | None) -> str:
    """Returns a pattern that makes another name of each part."""
    if pattern is None:
        return PATTERN
    wanted = "a file's name with {part} in it, ending in .safetensors"
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be {wanted}, got {shown(pattern)}")
    try:
        names = [pattern.format(rank=0, part=part) for part in (0, 1, "*")]
    except Exception:  # of whatever it formats with
        names = [""]
    plain_name = all(name == Path(name).name and "\0" not in name for name in names)
    if len(set(names)) < 2 or not plain_name or not pattern.endswith(".safetensors"):
        raise ValueError(f"pattern must be {wanted}, got {shown(pattern)}")
    return pattern


def _sources(params: type, config: StoredConfig) -> Any:
    """Returns the sources of weights that are stored as they are."""
    shapes = pytree.abstract(params, config.dims | {"param": "float32"})
    return jax.tree.map_with_path(_source, shapes)


def _source(path: Any, leaf: Any) -> Source:
    return Source(
        (pytree.name_of(path),), (leaf.shape,), lambda parts: parts[0], lambda whole: [whole]
    )
