"""Trees of arrays in folders, by orbax: any program that knows orbax can read them."""

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np
import orbax.checkpoint as ocp

from jaxrunner.errors import in_words
from jaxrunner.loading import checksums
from jaxrunner.loading.new_folder import new_folder
from jaxrunner.parallel.processes import is_shared, together
from jaxrunner.pytree import name_of

MOST_NAMED = 3  # leaves in one message


def save(folder: Path, tree: Any, mesh: Mesh | None = None) -> None:
    """Writes arrays, and the checksum of each file, into a new folder, which appears once whole.

    mesh: whose arrays they are; of several processes each writes what its devices have, and all
        see the folder.

    Raises:
      ValueError: the folder is there, or not seen by all.
    """
    with new_folder(folder, mesh) as part:
        write(part, tree, mesh)


def restore(folder: Path, like: Any, mesh: Mesh | None = None) -> Any:
    """Returns a tree of arrays. like: their shapes, dtypes, and the devices they are to lie on.

    Files that another program wrote have no checksums, and are taken without.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it holds others, and names up to three, or a file has changed since `save`.
    """

    def check() -> None:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} must be a folder that arrays were saved in")
        checksums.check(folder, required=False)

    together(mesh, check)
    return read(folder, like, mesh)


def write(folder: Path, tree: Any, mesh: Mesh | None = None) -> None:
    """Writes arrays as orbax does, without checksums.

    Raises:
      ValueError: the mesh is one process's own, and there are others: orbax writes no such arrays.
    """
    if _is_alone(mesh):
        raise ValueError(
            f"{folder} cannot be written: orbax writes arrays that lie on all processes, this mesh "
            f"is over one of {jax.process_count()}: take save_sharded_state, or a mesh over all"
        )
    with _checkpointer(mesh) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.StandardSave(tree))


def read(folder: Path, like: Any, mesh: Mesh | None = None) -> Any:
    """Returns what `write` wrote; as `restore` otherwise.

    Raises:
      ValueError: the folder holds others, or cannot be read.
    """
    check_like(folder, like, mesh)
    with _checkpointer(mesh) as checkpointer:
        try:
            wanted = ocp.args.StandardRestore(abstract(like))
            return checkpointer.restore(folder.absolute(), args=wanted)
        except Exception as error:  # of orbax, and of what it reads with
            raise ValueError(f"{folder} cannot be read as orbax's: {in_words(error)}") from error


def check_like(folder: Path, like: Any, mesh: Mesh | None = None) -> None:
    """Checks that a folder holds arrays of these shapes and dtypes, without reading them.

    Raises:
      ValueError: it does not; names up to three.
    """
    stored = _stored(folder, mesh)
    wanted = {
        name_of(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree.leaves_with_path(like)
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


def _stored(folder: Path, mesh: Mesh | None) -> dict[str, str]:
    """Returns the dtypes and shapes of the arrays in a folder, by name."""
    with _checkpointer(mesh) as checkpointer:
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


def _checkpointer(mesh: Mesh | None) -> ocp.Checkpointer:
    """Returns what writes and reads in all processes of a mesh, or in this one alone.

    Not orbax's asynchronous one: its processes wait for keys that carry each process's own count of
    saves, and hang once a process has saved more than another.
    """
    options = ocp.options.MultiprocessingOptions()
    if _is_alone(mesh):
        own = jax.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process{own}"
        )
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


def _is_alone(mesh: Mesh | None) -> bool:
    """Whether one process of several writes and reads what the others do not."""
    return jax.process_count() > 1 and not is_shared(mesh)
