"""Every public name stands on one page of the API, and its docstring says what no linter checks.

Ruff (D415, D417) checks summaries and the ``Args`` of functions; the site's strict build, links and
unknown names. Checked here, on the source as griffe reads it: parameters of classes and methods,
fields of records, shapes of tensors, exceptions that a body raises by name, and an example that
runs.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import griffe
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
LISTED = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
PACKAGE = griffe.load("deqseq", search_paths=[ROOT], docstring_parser="google")
EXCEPTIONS = {  # faults that are none, as patterns, and why
    r"\.(ImplicitCache|SolvedLM|CurriculumCallback)\.\w+: `": (
        "another library calls these methods and documents them"
    ),
    r"\.Deqseq\w+\.(\w+_pretrained|from_dict|register_for_auto_class): `": "see transformers",
    r"\.Deqseq\w+\.(set_attn_implementation|init_continuous_batching): `": "see transformers",
    r"\.Deqseq\w+\.(get_expanded_tied_weights_keys|prepare_inputs_\w+): `": "see transformers",
    r"\.Deqseq\w+: `unknown`": "collects misspelt names for the error",
    r"\.(distances|judge|begin|attach_to): ": "called by the library alone",
    r"\.testing\.\w+\.\w+Contract\.": "its methods are the tests themselves",
}


def target(path: str) -> griffe.Object:
    """What a path names; of a module and a function of one name, the function."""
    found = PACKAGE[path.removeprefix("deqseq.")]
    found = found[found.name] if found.is_module and found.name in found.members else found
    return found.final_target if found.is_alias else found


def modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inner in module.modules.values():
        yield from [] if inner.is_alias else modules(inner)


TENSOR = r"(\w+\[)?Tensor\b"
TENSORS = {  # names of tensor types, such as State
    name
    for module in modules(PACKAGE)
    for name, one in module.attributes.items()
    if not one.is_alias and re.match(TENSOR, str(one.value))
}


def raised(function: griffe.Object) -> set[str]:
    calls = [
        node.exc
        for node in ast.walk(ast.parse(dedent(function.source)))
        if isinstance(node, ast.Raise)
    ]
    names = {
        call.func.id
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return {name for name in names - {"NotImplementedError", "AssertionError"} if name[0] != "_"}


def faults(entry: griffe.Object, inherited: tuple[griffe.Object, ...] = ()) -> Iterator[str]:
    """What a docstring leaves out; that of a method may rely on those which it overrides."""
    docs = [one.docstring for one in (entry, *inherited) if one.docstring]
    if not docs or entry.is_attribute:
        yield from [] if docs else [f"{entry.path}: no docstring"]
        return
    prose = "\n".join(doc.value for doc in docs)
    lists = [
        part
        for doc in docs
        for part in doc.parsed
        if part.kind.value in ("parameters", "attributes")
    ]
    said = {
        name.strip(" *"): item.description
        for one in lists
        for item in one.value
        for name in item.name.split(",")
    }
    is_error, is_method = (
        entry.path.endswith(("Error", "Warning")),
        entry.is_function and entry.parent.is_class,
    )
    for parameter in () if is_error else entry.parameters:
        name, kinds = parameter.name.strip("*"), str(parameter.annotation).split(" | ")
        text = said.get(name) or (prose if is_method and f"`{name}`" in prose else None)
        if text is None and name not in ("self", "cls") and name[0] != "_":
            yield f"{entry.path}: `{name}` is not described"
        if (
            text
            and any(re.match(TENSOR, kind) or kind in TENSORS for kind in kinds)
            and "`(" not in text
        ):
            yield f"{entry.path}: `{name}` has no shape"
    methods = (
        [one for one in entry.functions.values() if not one.is_alias] if entry.is_class else []
    )
    public, built = [one for one in methods if one.name[0] != "_"], ("__init__", "__post_init__")
    makers = [entry] if entry.is_function else [one for one in methods if one.name in built]
    yield from (
        f"{entry.path}: {name} is not listed"
        for one in makers
        for name in raised(one)
        if name not in prose
    )
    examples = [one for one in (entry, *public) if one.docstring and ">>> " in one.docstring.value]
    record = [one.kind.value for one in lists] == ["attributes"]  # made by the library alone
    yield from [] if is_method or is_error or record or examples else [f"{entry.path}: no example"]
    for one in public:
        yield from faults(
            one, tuple(base[one.name] for base in entry.mro() if one.name in base.members)
        )


def test_every_public_name_is_on_one_page():
    assert sorted({name for name in LISTED if LISTED.count(name) > 1}) == []
    exported = [
        target(f"{module.path}.{name}")
        for module in modules(PACKAGE)
        for name in module.exports or ()
    ]
    files = [module for module in PACKAGE["integrations"].modules.values() if not module.exports]
    defined = [one for file in files for one in (*file.classes.values(), *file.functions.values())]
    exported += [one for one in defined if not one.is_alias and one.name[0] != "_"]
    listed = {target(name).path for name in LISTED}
    assert (
        sorted({one.path for one in exported if not one.is_module and one.path not in listed}) == []
    )


@pytest.mark.parametrize("name", LISTED)
def test_the_docstring_says_all_it_must(name):
    assert [
        one for one in faults(target(name)) if not any(re.search(each, one) for each in EXCEPTIONS)
    ] == []
