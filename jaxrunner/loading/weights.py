"""Weights of a model: from a checkpoint, to a checkpoint, or random."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from jaxrunner import pytree
from jaxrunner.config import DTYPES, check_dtype
from jaxrunner.errors import in_words
from jaxrunner.loading import checkpoint, safetensors_file
from jaxrunner.loading.declared import (
    abstract_params,
    named_leaves,
    sources_of,
    wanted_tensors,
)
from jaxrunner.loading.join import join, split
from jaxrunner.model import Stored, StoredConfig
from jaxrunner.parallel.placement import put
from jaxrunner.parallel.processes import host_copy
from jaxrunner.types import Array

MOST_NAMED, MOST_SHOWN = 10, 60  # leaves in a message, and characters of each


def load_params(
    folder: Path,
    model: Stored,
    config: StoredConfig,
    *,
    dtype: str,
    sharding_or_device: Any = None,
    files: Sequence[Path] = (),
    check_nan: bool = False,
    progress: bool = True,
) -> Any:
    """Returns the params of a checkpoint folder, in the dtypes they declare, on their device.

    dtype: of those that declare "param".
    Nothing is allocated before the whole checkpoint was checked; then at most two weights are on
    the host at a time, and as many of their parts. With `check_nan`, all values must be finite.
    files: of the folder, those that hold weights; where empty, those that a checkpoint has.

    Raises:
      FileNotFoundError, ValueError: a file is missing, no safetensors, or does not hold what
        `config` needs; names tensors and files. Or the model's sources do not make its params.
    """
    check_dtype("dtype", dtype)
    sources = sources_of(model, config)
    declared = abstract_params(model, config, dtype)
    found = checkpoint.find(folder, wanted_tensors(model, config), files, spare=model.spare)
    leaves, names, parts = [], (), {}
    bar = tqdm(
        total=sum(len(x.names) for x in sources),
        desc="weights",
        unit="tensor",
        disable=not progress,
    )
    with bar, ExitStack() as undo:
        undo.callback(pytree.delete, leaves)  # a traceback that is kept would keep the memory
        for source, (where, leaf) in zip(sources, named_leaves(declared), strict=True):
            if source.names != names:  # weights and their scales are made of the same
                names, parts = source.names, {}
                for name in names:
                    path, tensor = found[name]
                    parts[f"{path}: {name}"] = safetensors_file.read(path, name, tensor)
                if check_nan:
                    check_finite(parts)
                bar.update(len(parts))
            at = sharding_or_device or leaf.sharding
            leaves.append(put(join(where, source, parts, leaf), at))
            # One transfer is on its way while the next weight is joined, not more.
            jax.block_until_ready(leaves[-2:-1])
        undo.pop_all()
    return jax.tree.unflatten(jax.tree.structure(declared), leaves)


def check_checkpoint(
    folder: Path, model: Stored, config: StoredConfig, files: Sequence[Path] = ()
) -> None:
    """Checks the headers of a checkpoint, as `load_params` does before it reads; raises as it."""
    checkpoint.find(folder, wanted_tensors(model, config), files, spare=model.spare)


def random_params(model: Stored, config: StoredConfig, dtype: str, seed: int) -> Any:
    """Returns params made on their devices, each its own shards: norms one, all else normal with
    deviation 0.02.

    Integers are any of their dtype; scales make about that deviation of numbers of 8 bits.
    """
    key = jax.random.key(seed)
    leaves, treedef = jax.tree.flatten_with_path(abstract_params(model, config, dtype))
    made = [
        _maker(leaf.shape, leaf.dtype, _fill(str(path[-1]), leaf.dtype), leaf.sharding)(
            jax.random.fold_in(key, i)
        )
        for i, (path, leaf) in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, made)


def like(new: Any, old: Any) -> Any:
    """Returns `new`, a tree of arrays, if a program compiled for `old` takes it.

    Arrays of the host are put where the old ones are; those of a device are taken as they are.
    `old` may be shapes, dtypes and shardings alone.

    Raises:
      ValueError, TypeError: a tree, shape, dtype or sharding that differs, or an array that was
        deleted; names it.
    """
    if type(new) is not type(old):  # it may be any list, however long
        kinds = type(old).__name__, type(new).__name__
        raise ValueError(
            f"params must have the leaves of those they replace, in {kinds[0]}, got {kinds[1]}"
        )
    try:
        same = jax.tree.structure(new) == (structure := jax.tree.structure(old))
    except Exception as error:  # of JAX, and of objects that are keys
        raise TypeError(f"params must be a tree of arrays: {in_words(error)}") from error
    if not same:
        paths = [
            {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
            for tree in (new, old)
        ]
        missing, unknown = (_named(paths[i] - paths[1 - i]) for i in (1, 0))
        raise ValueError(
            f"params must have the leaves of those they replace: {missing} are missing, {unknown} "
            f"are not known, of {structure.num_leaves}"
        )
    pairs = zip(jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True)
    leaves = [_like(f"params{jax.tree_util.keystr(path)}", x, y) for (path, x), y in pairs]
    return jax.tree.unflatten(structure, leaves)


def _named(paths: set[str]) -> str:
    """Returns a few of many names, each cut where it is long."""
    few = [path[:MOST_SHOWN] for path in sorted(paths)[:MOST_NAMED]]
    return f"{few} and {len(paths) - len(few)} more" if len(paths) > len(few) else str(few)


def _like(name: str, new: Any, old: Any) -> Any:
    if not isinstance(new, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be an array, got {type(new).__name__}")
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{name} must be {old.dtype} {list(old.shape)}, got {new.dtype} {list(new.shape)}"
        )
    if isinstance(new, np.ndarray):
        return put(new, old.sharding)
    if new.is_deleted():
        raise ValueError(f"{name} was deleted: donate no array that an engine is to use")
    if not new.sharding.is_equivalent_to(old.sharding, old.ndim):
        raise ValueError(
            f"{name} must be sharded as {old.sharding}, got {new.sharding}: jax.device_put it there"
        )
    return new


def check_tensors(model: Stored, config: StoredConfig, tensors: dict[str, Any]) -> None:
    """Checks tensors, by their Hugging Face names, against a model.

    Raises:
      ValueError: a name that the model does not have, or another shape.
    """
    wanted = wanted_tensors(model, config)
    for name, tensor in tensors.items():
        if name not in wanted:
            raise ValueError(f"{name!r} is no tensor of this model, it has {sorted(wanted)[:3]}, …")
        if tuple(tensor.shape) != (shape := wanted[name].shape):
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")


def check_finite(parts: dict[str, np.ndarray]) -> None:
    """Checks all values of tensors, by their names.

    Raises:
      ValueError: one is NaN or infinite.
    """
    for where, part in parts.items():
        bad = part.size - np.count_nonzero(np.isfinite(part))
        if bad:
            raise ValueError(
                f"{where} holds {bad} of {part.size} values that are NaN or infinite, all must be "
                "finite: correct them, or load the model with check_nan=False"
            )


def check_leaves(params: Any) -> None:
    """Checks all values of params, where they lie.

    Raises:
      ValueError: one is NaN or infinite; names its leaf.
    """
    finite = jax.device_get(jax.tree.map(_is_finite, params))
    for path, good in jax.tree.leaves_with_path(finite):
        if not good:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} holds values that are NaN or infinite, all "
                "must be finite: correct them, or load the model with check_nan=False"
            )


def _is_finite(leaf: Any) -> Any:
    """Whether a leaf is finite; what is no array that lives is another check's."""
    lives = isinstance(leaf, jax.Array) and not leaf.is_deleted()
    return jnp.isfinite(leaf).all() if lives or isinstance(leaf, np.ndarray) else True


def with_tensors(model: Stored, config: StoredConfig, params: Any, tensors: dict[str, Any]) -> Any:
    """Returns `params` with some tensors of a checkpoint in place of what they were made of.

    Leaves that no tensor belongs to are the old ones. tensors: by their Hugging Face names.

    Raises:
      ValueError: as `check_tensors`, or values that the dtype does not hold.
    """
    check_tensors(model, config, tensors)
    leaves = []
    for source, (where, leaf) in zip(sources_of(model, config), named_leaves(params), strict=True):
        parts = {n: np.asarray(tensors[n]) for n in source.names if n in tensors}
        if parts:
            if len(parts) < len(source.names):
                old = split(where, source, host_copy(leaf))
                parts = dict(zip(source.names, old, strict=True)) | parts
            leaf = put(join(where, source, parts, leaf), leaf.sharding)
        leaves.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(params), leaves)


def save_checkpoint(
    folder: Path, model: Stored, config: StoredConfig, params: Any, config_json: dict[str, Any]
) -> None:
    """Writes model.safetensors and config.json as Hugging Face lays them out.

    The tensors have the dtype of `params`, and config.json says so; one weight at a time is copied
    to the host.
    """
    pairs = list(zip(sources_of(model, config), named_leaves(params), strict=True))
    tensors = {
        name: (leaf.dtype, shape)
        for source, (_, leaf) in pairs
        for name, shape in zip(source.names, source.shapes, strict=True)
    }

    def arrays() -> Iterator[np.ndarray]:
        for source, (where, leaf) in pairs:
            # A JAX array keeps the host copy made of it for life: let a copy of it do so.
            yield from split(where, source, np.asarray(leaf.copy()))

    folder.mkdir(parents=True, exist_ok=True)
    safetensors_file.write(folder / "model.safetensors", tensors, arrays())
    # Every transformers reads the old name of the dtype.
    stored = config_json | {"torch_dtype": pairs[0][1][1].dtype.name}
    stored.pop("dtype", None)
    text = json.dumps(stored, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _fill(name: str, dtype: Any) -> float | None:
    """Returns what fills a leaf whose values are not random; None for one whose values are."""
    if "norm" in name or name == ".input_scale":
        return 1.0
    if name == ".scale":
        return 2.0**-12 if jnp.issubdtype(dtype, jnp.floating) else 121.0  # 2^-6 of 4 bits
    return 0.0 if name in (".permutation", ".moved", ".more") else None


@functools.lru_cache
def _maker(
    shape: tuple[int, ...], dtype: Any, fill: float | None, sharding: Any
) -> Callable[[Array], Array]:
    """Returns a program that makes a leaf of a key; no device has more of it than its shards."""

    def make(key: Array) -> Array:
        if fill is not None:
            return jnp.full(shape, fill, dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, jnp.iinfo(dtype).min, jnp.iinfo(dtype).max, dtype)
        made, deviation = (dtype, 0.02) if dtype.name in DTYPES else (jnp.float32, 64.0)
        return (jax.random.normal(key, shape, made) * deviation).astype(dtype)

    return jax.jit(make, out_shardings=sharding)
