"""Trees of arrays in folders, by orbax: any program that knows orbax can read them."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

MOST_NAMED = 3  # leaves in one message


def save(folder: Path, tree: Any) -> None:
    """Writes arrays into a new folder, which appears once it is whole.

    Raises:
      ValueError: the folder is there.
    """
    check_new(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)


def restore(folder: Path, like: Any) -> Any:
    """Returns a tree of arrays. like: their shapes, dtypes, and the devices they are to lie on.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds others; names up to three.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} must be a folder that arrays were saved in")
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = checkpointer.metadata(folder.absolute()).item_metadata
        stored = {x.name: f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(metadata)}
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
        return checkpointer.restore(folder.absolute(), abstract(like))


def abstract(tree: Any) -> Any:
    """Returns the shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def check_new(folder: Path) -> None:
    """Checks that nothing is there yet.

    Raises:
      ValueError: something is.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a new folder")
