"""A folder that appears under its name once all of it is written, and else not at all."""

from collections.abc import Iterator
import contextlib
from functools import partial
import os
from pathlib import Path
import tempfile

from jax.sharding import Mesh

from jaxrunner.loading import checksums
from jaxrunner.parallel.processes import is_first, together


@contextlib.contextmanager
def new_folder(folder: Path, mesh: Mesh | None = None, *, sums: bool = True) -> Iterator[Path]:
    """Yields a folder to fill, which takes its name at the end.

    mesh: whose processes fill it, on a disk that all of them see; sums: whether the checksums of
        its files are written there too.

    Raises:
      ValueError: the folder is there, or a process does not see what the first one makes.
    """
    folder = folder.absolute()
    with contextlib.ExitStack() as stack:

        def make() -> str:
            check_new(folder)
            if not is_first(mesh):
                return ""
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.TemporaryDirectory(dir=folder.parent, prefix=folder.name)
            return stack.enter_context(made)

        unfinished = Path(together(mesh, make)[0])
        together(mesh, lambda: check_seen(unfinished))
        part = unfinished / "whole"
        try:
            yield part
        except Exception as error:
            together(mesh, partial(_again, error))  # the others would wait for this process

        def finish() -> None:
            if is_first(mesh):
                if sums:
                    checksums.write(part)
                os.rename(part, folder)

        together(mesh, finish)


def _again(error: Exception) -> None:
    raise error


def check_new(folder: Path) -> None:
    """Checks that nothing is there yet.

    Raises:
      ValueError: something is.
    """
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a new folder")


def check_seen(folder: Path) -> None:
    """Checks that this process sees a folder that another one has made.

    Raises:
      ValueError: it does not.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder.parent} is not the same folder in all processes of this mesh: name one on a "
            "disk that all of them see"
        )
