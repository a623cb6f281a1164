"""The rules of style that a program can check, on every file there is."""

import ast
import io
from pathlib import Path
import re
import tokenize

import pytest

from tests.support.messages import expected, fragments, unmatched
from tests.support.sources import (
    LAYERS,
    ROOT,
    imports,
    nodes,
    package,
    package_name,
    python_files,
    suite,
    tree,
)

PURE = (
    "step.py", "types.py", "rule.py", "slot_table.py", "indexing.py", "device/tables.py",
    "ops/plain.py", "sampling/", "models/", "kernels_pallas/", "speculators/",
)  # fmt: skip
ALIASES = ("inputs", "outputs", "logprobs", "sampling_params")  # parts of api/, where vLLM has them
NO_JAX = ("api", "text", "scheduling")
MODULES = 18  # of a folder
SUPPRESSION = re.compile(
    r"#\s*(noqa|type:\s*ignore|pyright:|mypy:|ruff:|flake8:|pylint:|isort:|pragma:|nosec)"
)
RUNS_CODE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
TALKS = {"socket", "socketserver", "http", "urllib", "requests", "xmlrpc", "multiprocessing"}


def num_lines(first: ast.stmt, last: ast.stmt) -> int:
    return (last.end_lineno or last.lineno) - first.lineno + 1


def limits(path: Path) -> tuple[int, int]:
    """Returns the most lines of a file and of a function in it."""
    return (400, 120) if "kernels_pallas" in path.parts else (300, 50)


def test_files_are_short():
    sizes = {path: len(path.read_text().splitlines()) for path in [*package(), *suite()]}
    assert not [f"{path}: {n} lines" for path, n in sizes.items() if n > limits(path)[0]]


def test_functions_are_short():
    assert not [
        f"{place} {node.name}: {num_lines(node, node)} lines"
        for path in [*package(), *suite()]
        for place, node in nodes([path], ast.FunctionDef, ast.AsyncFunctionDef)
        if num_lines(node, node) > limits(path)[1]
    ]


def test_step_reads_at_a_glance():
    steps = [node for _, node in nodes(named("step.py"), ast.FunctionDef) if node.name == "step"]
    (body,) = [s.body[1:] if ast.get_docstring(s) else s.body for s in steps]
    assert num_lines(body[0], body[-1]) <= 15


def test_checkers_are_never_silenced():
    found, folders = [], ("jaxrunner", "models", "kernels_pallas", "tests", "benchmarks")
    for path in [p for p in python_files(*folders) if SUPPRESSION.search(p.read_text())]:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT and SUPPRESSION.match(token.string):
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]} {token.string}")
    assert not found


def test_nothing_reads_the_environment():
    names = re.compile(r"(get|put|unset)?env(iron)?b?$")
    assert not [
        place
        for place, node in nodes(package(), ast.Attribute, ast.ImportFrom)
        if (
            isinstance(node, ast.Attribute) and is_name(node.value, "os") and names.match(node.attr)
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and imports_any(node, names))
    ]


def test_nothing_is_global():
    assert not [place for place, _ in nodes(package(), ast.Global)]


def test_device_code_changes_no_object():
    pure = [path for path in package() if package_name(path).startswith(PURE)]
    assert all(any(package_name(path).startswith(name) for path in pure) for name in PURE)
    writes = [
        place
        for place, node in nodes(pure, ast.Attribute)
        if isinstance(node.ctx, ast.Store | ast.Del)
    ]
    calls = [place for place, node in nodes(pure, ast.Call) if called(node) in SETTERS]
    assert not writes + calls


def test_models_know_no_mesh():
    words, models = re.compile("mesh|sharding", re.IGNORECASE), python_files("models")
    assert models and not [path for path in models if words.search(path.read_text())]


@pytest.mark.parametrize("folder", NO_JAX)
def test_what_users_pass_texts_and_the_scheduler_know_no_jax(folder):
    modules, found = python_files(f"jaxrunner/{folder}"), {}
    assert modules
    for path in modules:
        for module, names in reachable(module_name(path)).items():
            if any(n.split(".")[0] in ("jax", "jaxlib", "flax") for n in names):
                found[path.name] = module
    assert not found


def test_imports_run_one_way():
    """Of a circle one import would run up; what is in no layer has no place in the picture."""
    up = []
    for path in package():
        own = layer(module_name(path))
        for name in imports(path):
            if name.startswith("jaxrunner.") and LAYERS.index(layer(name)) > LAYERS.index(own):
                up.append(f"{package_name(path)} imports {name}")
    assert not up


def test_no_modules_import_each_other():
    """Within a folder, too: each module can be read behind those that it imports."""
    names = {f"jaxrunner.{package_name(path)[:-3].replace('/', '.')}": path for path in package()}
    left = {}
    for name, path in names.items():  # what runs when it is imported: no function's own imports
        statements = ast.iter_child_nodes(tree(path)[0])
        own = [x for x in statements if isinstance(x, ast.ImportFrom)]
        found = {f"{x.module}.{alias.name}" for x in own for alias in x.names}
        left[name] = (found | {x.module for x in own}) & names.keys()
    while ready := [name for name, found in left.items() if not found & left.keys()]:
        left = {name: found for name, found in left.items() if name not in ready}
    assert not left and len(names) > 300


def test_no_test_imports_another():
    """What several share is in `tests/support`."""
    paths = suite()
    assert any("tests.support.sources" in imports(path) for path in paths)
    assert not [
        f"{path.name} imports {name}"
        for path in paths
        for name in imports(path)
        if re.match(r"(tests\.)?test_", name)
    ]


def test_nothing_is_patched():
    """Benchmarks and the package observe by public hooks, such as `runner.phases`."""
    paths = [*package(), *python_files("benchmarks")]
    assert not [str(path) for path in paths if any("mock" in name for name in imports(path))]


def test_folders_hold_one_idea():
    """More modules than a reader overlooks are two folders."""
    folders = {path.parent for path in package()}
    other = {"__init__.py", "__main__.py", *(f"{name}.py" for name in ALIASES)}
    counts = {str(f): len([p for p in f.glob("*.py") if p.name not in other]) for f in folders}
    assert len(counts) > 10
    assert not {name: count for name, count in counts.items() if count > MODULES}


def test_nothing_runs_foreign_code_or_opens_a_port():
    banned = RUNS_CODE | TALKS
    found = [f"{p}: {n}" for p in package() for n in imports(p) if n.split(".")[0] in banned]
    # A process and the one that it has started talk by pipes that nobody else has.
    own = next(path for path in package() if path.name == "lowering.py")
    found.remove(f"{own}: pickle")
    calls = [
        f"{place} {called(node)}"
        for place, node in nodes(package(), ast.Call)
        if called(node) in ("eval", "exec", "__import__", "torch.load")
        or any(k.arg in ("allow_pickle", "trust_remote_code") for k in node.keywords)
    ]
    assert not found + calls


def test_every_field_of_a_pytree_declares_its_axes():
    assert not [
        f"{place} {node.name}.{ast.unparse(field.target)}"
        for place, node in nodes(package(), ast.ClassDef)
        if any(is_name(d, "pytree") for d in node.decorator_list)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and not declares(field)
    ]


def test_every_error_is_tested():
    raised = list(nodes(package(), ast.Raise))
    messages = [fragments(node) for _, node in raised]
    others = (path for path in suite() if path.name != "test_style.py")
    said = [text for path in others for text in expected(tree(path)[0])]
    missed = [
        f"{place}: {message}"
        for (place, _), message, bad in zip(
            raised, messages, unmatched(messages, said), strict=True
        )
        if bad
    ]
    assert not missed, "no test expects these messages:\n" + "\n".join(missed)


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("with raises(match='x must be 3, got 4'): pass", True),
        ("def f(words): raises(match=words)\nf('x must be 3, got')", True),
        ("for words in ['y must be']: assert words in str(error)\nx = 'x must be 3, got'", False),
        ("x = 'x must be 3, got'", False),
        ("assert 'y must be 3, got' in str(error)", False),
    ],
)
def test_a_message_counts_where_it_is_compared(test, found):
    (bad,) = unmatched([["x must be 3, got"]], expected(ast.parse(test)))
    assert bad != found


DECLARED = ("leaf", "each", "nested", "part", "by_name", "static")
PLAIN = ("Array", "jax.Array", "int", "float", "bool", "str")
SETTERS = ("setattr", "delattr", "object.__setattr__", "object.__delattr__")


def named(name: str) -> list[Path]:
    return [path for path in package() if package_name(path) == name]


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def called(node: ast.Call) -> str:
    return ast.unparse(node.func)


def imports_any(node: ast.ImportFrom, names: re.Pattern) -> bool:
    return any(names.match(alias.name) for alias in node.names)


def module_name(path: Path) -> str:
    """Returns the name by which a module is imported: `jaxrunner.models.llama`."""
    return f"jaxrunner.{package_name(path).removesuffix('.py').replace('/', '.')}"


def layer(module: str) -> str:
    """Returns the folder, or the module above all folders, that a module belongs to.

    What a folder's modules are to the rest may be a layer of its own.
    """
    if (own := ".".join(module.split(".")[1:3])) in LAYERS:
        return own
    name = [*module.split("."), "__init__"][1]
    return name if name in LAYERS else "__init__"  # which has the names of `jaxrunner` itself


def reachable(module: str) -> dict[str, set[str]]:
    """Returns what each module of ours imports, from `module` on; packages' own files aside."""
    found, left = {}, [module]
    while left:
        name = left.pop()
        path = ROOT / f"{name.replace('.', '/')}.py"
        if name not in found and path.is_file():
            found[name] = imports(path.resolve())
            left += found[name]
    return found


def declares(field: ast.AnnAssign) -> bool:
    """Returns whether a field is a `leaf`, static, or another pytree."""
    if ast.unparse(field.annotation).startswith("ClassVar"):
        return True
    if field.value is not None:
        return isinstance(field.value, ast.Call) and called(field.value) in DECLARED
    return ast.unparse(field.annotation) not in PLAIN
