"""The text the embedded model is trained on: one Python's standard library. Knows no JAX."""

import ast
from collections.abc import Sequence
import hashlib
from pathlib import Path
import re
import tokenize
from typing import NamedTuple

# Tests, other programs, tables of characters, what pip installs, what depends on the machine.
SKIPPED_FOLDERS = frozenset(
    """__pycache__ dist-packages encodings idle_test idlelib lib-dynload lib2to3 site-packages test
    tests turtledemo""".split()
)
SKIPPED_FILES = re.compile(r"(^|/)_sysconfigdata|^config-|^html/entities\.py$|^pydoc_data/__init__")
TOPICS = "pydoc_data/topics.py"

# A notice of someone else's that does not say it is licensed to the Python Software Foundation,
# or that sets terms of its own.
TERMS = re.compile(
    r"permission to use|permission is\s+hereby|redistribut|licensed under the|public licen[sc]e"
    r"|PSF license for|same terms as|is provided ['\"]?as.is|SPDX-License",
    re.IGNORECASE,
)
NOTICE = re.compile(
    r"all\s+rights\s+reserved|copyright[:\s]+(\(c\)|©|\d{4}|cnri)|copyright applies", re.IGNORECASE
)
OURS = re.compile(
    r"licensed to (the )?PSF under a contributor agreement"
    r"|copyright (\(c\)|©)?\s*[-\d, ]+,? (the )?python software foundation",
    re.IGNORECASE,
)
HELD_OUT = 20  # one file of so many is held out


class File(NamedTuple):
    """A file of the corpus."""

    path: str  # below the library's folder, with slashes
    sha256: str  # of its bytes
    held_out: bool
    text: str


def read_corpus(stdlib: Path) -> list[File]:
    """Returns the corpus found in a standard library's folder, sorted by path.

    Raises:
      ValueError: nothing is there.
    """
    paths = {path.relative_to(stdlib).as_posix(): path for path in stdlib.rglob("*.py")}
    files = [_read(name, paths[name]) for name in sorted(paths) if is_listed(name)]
    files = [file for file in files if file.text.strip() and is_free(file.text)]
    if not files:
        raise ValueError(f"stdlib={stdlib} must hold Python's standard library, got no source")
    return files


def is_listed(path: str) -> bool:
    """Whether the rules on names admit a file."""
    return not (SKIPPED_FOLDERS & set(path.split("/")[:-1]) or SKIPPED_FILES.search(path))


def is_free(text: str) -> bool:
    """Whether a file carries no notice but the Python Software Foundation's."""
    return not TERMS.search(text) and (not NOTICE.search(text) or bool(OURS.search(text)))


def is_held_out(path: str) -> bool:
    """Whether a file is kept from training; the same in every version of Python."""
    return int(hashlib.sha256(path.encode()).hexdigest()[:8], 16) % HELD_OUT == 0


def file_list(files: Sequence[File]) -> str:
    """Returns the text of `files.txt`: a hash, a part and a path on each line."""
    part = {False: "train   ", True: "held-out"}
    return "".join(f"{f.sha256}  {part[f.held_out]}  {f.path}\n" for f in files)


def _read(name: str, path: Path) -> File:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with tokenize.open(path) as source:
        text = source.read()
    if name == TOPICS:
        text = _topics(text)
    return File(name, digest, is_held_out(name), text)


def _topics(source: str) -> str:
    """Returns the prose of the language reference out of the dictionary it is stored in."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return "\n\n".join(ast.literal_eval(node.value).values())
    raise ValueError(f"{TOPICS} must assign a dictionary of topics, got none")
