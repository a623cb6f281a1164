"""Trees of arrays in folders, by orbax: any program that knows orbax can read them."""

import os
from pathlib import Path
import tempfile
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrunner.errors import in_words
from jaxrunner.loading import checksums

MOST_NAMED = 3  # leaves in one message


def save(folder: Path, tree: Any) -> None:
    """Writes arrays, and the checksum of each file, into a new folder, which appears once whole.

    Raises:
      ValueError: the folder is there.
    """
    check_new(folder)
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name) as unfinished:
        part = Path(unfinished, "arrays")
        write(part, tree)
        checksums.write(part)
        os.rename(part, folder)


def restore(folder: Path, like: Any) -> Any:
    """Returns a tree of arrays. like: their shapes, dtypes, and the devices they are to lie on.

    Files that another program wrote have no checksums, and are taken without.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds others, and names up to three, or a file has changed since `save`.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a folder that arrays were saved in")
    checksums.check(folder, required=False)
    return read(folder, like)


def write(folder: Path, tree: Any) -> None:
    """Writes arrays as orbax does, without checksums."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)


def read(folder: Path, like: Any) -> Any:
    """Returns what `write` wrote; as `restore` otherwise."""
    check_like(folder, like)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            return checkpointer.restore(folder.absolute(), abstract(like))
        except Exception as error:  # of orbax, and of what it reads with
            raise ValueError(f"{folder} cannot be read as orbax's: {in_words(error)}") from error


def check_like(folder: Path, like: Any) -> None:
    """Checks that a folder holds arrays of these shapes and dtypes, without reading them.

    Raises:
      ValueError: it does not; names up to three.
    """
    stored = _stored(folder)
    wanted = {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{x.dtype}{list(x.shape)}"
        for path, x in jax.tree.leaves_with_path(like)
    }
    names = sorted(n for n in stored | wanted if stored.get(n) != wanted.get(n))
    if names:
        named = "; ".join(
            f"{n} is {stored.get(n, 'missing')}, wanted {wanted.get(n, 'none')}"
            for n in names[:MOST_NAMED]
        )
        raise ValueError(
            f"{folder} must hold the arrays of this model, {len(names)} differ: {named}"
        )


def _stored(folder: Path) -> dict[str, str]:
    """Returns the dtypes and shapes of the arrays in a folder, by name."""
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder.absolute()).item_metadata
            stored = {x.name: f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(metadata)}
        except Exception as error:
            raise ValueError(
                f"folder={folder} holds no arrays of orbax: {in_words(error)}"
            ) from error
    if metadata is None:
        raise ValueError(f"folder={folder} holds no arrays of orbax, or its metadata are broken")
    return stored


def abstract(tree: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a tree of arrays; those of the host stay."""

    def one(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(one, tree)


def check_new(folder: Path) -> None:
    """Checks that nothing is there yet.

    Raises:
      ValueError: something is.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a new folder")
