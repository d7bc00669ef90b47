"""How the package hangs together: no circles, no imports inside functions, no tests for the type of
our own parts.
"""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import deqseq as dq

PACKAGE = Path(dq.__file__).parent
REQUIRED = {
    "deqseq",
    "torch",
    "einops",
    "jaxtyping",
    "numpy",
    "safetensors",
} | sys.stdlib_module_names
MIDDLE = ["solve.py", "windows.py", "step.py", "tokens.py", "models/*.py"]
"""Files that must treat all sweeps, solvers and gradients alike."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module_name(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def imported_names(node):
    """Everything that an import could load: what is taken from a module may be a module too."""
    names = [alias.name for alias in node.names]
    return (
        names
        if isinstance(node, ast.Import)
        else [str(node.module), *(f"{node.module}.{name}" for name in names)]
    )


def loading_imports(tree):
    """The imports that run when a module is loaded."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, IMPORTS):
            yield child
        elif not isinstance(child, FUNCTIONS) and not (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        ):
            yield from loading_imports(child)


def loaded_with(module):
    """The modules of ours that a module loads: what it imports, and the packages that
    this lies in.
    """
    names = [
        name.split(".") for node in loading_imports(TREES[module]) for name in imported_names(node)
    ]
    loaded = {
        ".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)
    } & TREES.keys()
    return {other for other in loaded if not f"{module}.".startswith(f"{other}.")}


def test_no_module_needs_itself():
    TopologicalSorter({module: loaded_with(module) for module in TREES}).prepare()  # names a circle


def test_a_module_imports_of_its_own_row_of_the_contributing_page_and_of_those_below():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    rows = {
        name: at for at, cell in enumerate(cells) for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)
    }
    parts = {module: module.split(".")[1] for module in TREES if "." in module}
    assert set(parts.values()) == rows.keys()
    above = {
        (module, other)
        for module in parts
        for other in loaded_with(module) & parts.keys()
        if rows[parts[other]] < rows[parts[module]]
    }
    assert above == set()


def test_no_file_is_longer_than_the_contributing_page_says():
    lengths = {path.name: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert max(lengths.values()) <= 450, lengths


def test_imports_stand_at_the_top_but_for_extras():
    inside = {
        (module, name)
        for module, tree in TREES.items()
        for function in ast.walk(tree)
        if isinstance(function, FUNCTIONS)
        for node in ast.walk(function)
        if isinstance(node, IMPORTS)
        for name in imported_names(node)[:1]
        if name.partition(".")[0] in REQUIRED
    }
    assert inside == {("deqseq.solution", "deqseq.diagnostics.explain")}


def test_the_middle_does_not_ask_which_sweep_solver_or_gradient_it_has():
    parts = {
        name
        for name, part in vars(dq).items()
        if isinstance(part, type) and issubclass(part, dq.Sweep | dq.Solver | dq.Gradient)
    }
    assert {"Sliding", "Anderson", "Phantom", "Sweep", "Solver", "Gradient"} <= parts
    asked = {
        (path.name, ast.unparse(node))
        for pattern in MIDDLE
        for path in PACKAGE.glob(pattern)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if parts & {name.rpartition(".")[2] for name in map(ast.unparse, ast.walk(node.args[-1]))}
    }
    assert asked == set()
