"""The sources of the project: which there are, in which layers, and their syntax."""

import ast
from collections.abc import Iterable, Iterator
import functools
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.stmt | ast.expr)
ROOT = Path(__file__).resolve().parents[2]
# The folders and modules of the package, lowest first: each imports those before it alone.
LAYERS = tuple(
    """
    errors pytree parallel.mesh parallel.shards parallel.row_share version api hf_config types
    parallel.stages caches inputs outputs logprobs config indexing operation ops.grouping linear
    mixtures.experts ops.routing slot_table heads.head speculators.speculator
    speculators.draft_logits rule model quantization text scheduling lora.product lora.table
    lora.adapted_linear lora.saved_modules lora.saved_layers program lora.stacks program.shapes
    sampling kernels_pallas step device ops models heads mixtures pooling speculators parallel lora
    loading runner.slot runner.uploads runner.request_table ranks programs runner worker engine
    elastic pooling.llm llm sampling_params embedded __init__ lm_eval bench check train __main__
    """.split()
)


def python_files(*folders: str) -> list[Path]:
    """Returns the sources in `folders`, each once: links are not followed."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in found if path == path.resolve())


def package() -> list[Path]:
    """Returns the sources of the package."""
    return python_files("jaxrunner", "models", "kernels_pallas")


def suite() -> list[Path]:
    """Returns the sources of the tests."""
    return python_files("tests")


def package_name(path: Path) -> str:
    """Returns the path inside the package: `models/x.py`, `step.py`."""
    return path.relative_to(ROOT).as_posix().removeprefix("jaxrunner/")


@functools.cache
def tree(path: Path) -> list[ast.AST]:
    """Returns the nodes of a source's syntax, the module first."""
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8"), path.name))]


def nodes(paths: Iterable[Path], *kinds: type[Node]) -> Iterator[tuple[str, Node]]:
    """Yields each node of `kinds`, with its place."""
    for path in paths:
        for node in tree(path):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def imports(path: Path) -> set[str]:
    """Returns the full names of the modules that a file imports."""
    names = set()
    for _, node in nodes([path], ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names
