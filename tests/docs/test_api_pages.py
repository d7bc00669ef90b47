"""Every public name stands on one page of the API, and its docstring says what no linter checks.

Ruff (D415, D417) checks summaries and the ``Args`` of functions; the site's strict build, links and
unknown names. Checked here, on the source as griffe reads it: parameters of classes and methods,
fields of records, shapes of tensors, exceptions that a body raises by name, and an example that
runs.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

import griffe
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))]
LISTED = [name for page in PAGES for name in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
PACKAGE = griffe.load("deqseq", search_paths=[ROOT], docstring_parser="google")
EXCEPTIONS = {  # faults that are none, as patterns, and why
    r"\.(ImplicitCache|SolvedLM|CurriculumCallback|SolveLog)\.\w+: `": (
        "another library calls these methods and documents them"
    ),
    r"\.Deqseq\w+\.(\w+_pretrained|from_dict|register_for_auto_class): `": "see transformers",
    r"\.Deqseq\w+\.(set_attn_implementation|init_continuous_batching): `": "see transformers",
    r"\.Deqseq\w+\.(get_expanded_tied_weights_keys|prepare_inputs_\w+): `": "see transformers",
    r"\.Deqseq\w+: `unknown`": "collects misspelt names for the error",
    r"\.(distances|judge|begin|attach_to): ": "called by the library only",
    r"\.(repeat|values): ": "called by explain() only",
    r"\.testing\.\w+\.\w+Contract\.": "its methods are the tests themselves",
}


def target(path):
    """What a path names; of a module and a function of one name, the function."""
    found = PACKAGE[path.removeprefix("deqseq.")]
    found = found[found.name] if found.is_module and found.name in found.members else found
    return found.final_target if found.is_alias else found


def modules(module):
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


def raised(function):
    """The exceptions that a body raises by name."""
    names = set()
    for node in ast.walk(ast.parse(dedent(function.source))):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))) if name[0] != "_":
                names.add(name)
    return names - {"NotImplementedError", "AssertionError"}


def described(docs):
    """What is said of each parameter or attribute."""
    said = {}
    for doc in docs:
        for section in doc.parsed:
            if section.kind.value in ("parameters", "attributes"):
                for item in section.value:
                    for name in item.name.split(","):
                        said[name.strip(" *")] = item.description
    return said


def parameter_faults(entry, docs):
    said = described(docs)
    prose = "\n".join(doc.value for doc in docs)
    for parameter in entry.parameters:
        name = parameter.name.strip("*")
        if name in ("self", "cls"):
            continue
        text = said.get(name)
        if text is None and is_method(entry) and f"`{name}`" in prose:
            text = prose
        if text is None and name[0] != "_":
            yield f"{entry.path}: `{name}` is not described"
        for kind in str(parameter.annotation).split(" | "):
            is_tensor = re.match(TENSOR, kind) or kind in TENSORS
            if text and is_tensor and "`(" not in text:
                yield f"{entry.path}: `{name}` has no shape"


def is_method(entry):
    return entry.is_function and entry.parent.is_class


def faults(entry, inherited=()):
    """What a docstring leaves out; that of a method may rely on those which it overrides."""
    docs = [one.docstring for one in (entry, *inherited) if one.docstring]
    if not docs:
        yield f"{entry.path}: no docstring"
    if not docs or entry.is_attribute:
        return
    is_error = entry.path.endswith(("Error", "Warning"))
    if not is_error:
        yield from parameter_faults(entry, docs)
    methods = []
    if entry.is_class:
        methods = [one for one in entry.functions.values() if not one.is_alias]
    public = [one for one in methods if one.name[0] != "_"]
    makers = [one for one in methods if one.name in ("__init__", "__post_init__")]
    for maker in makers if entry.is_class else [entry]:
        for name in raised(maker):
            if not any(name in doc.value for doc in docs):
                yield f"{entry.path}: {name} is not listed"
    kinds = [section.kind.value for doc in docs for section in doc.parsed]
    is_record = "attributes" in kinds and "parameters" not in kinds  # made by the library
    examples = [one for one in (entry, *public) if one.docstring and ">>> " in one.docstring.value]
    if not (is_method(entry) or is_error or is_record or examples):
        yield f"{entry.path}: no example"
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


@pytest.fixture
def package():
    """The package with docstrings as the site shows them."""
    extensions = griffe.load_extensions(ROOT / "docs" / "_tools" / "docstrings.py")
    return griffe.load("deqseq", search_paths=[ROOT], extensions=extensions)


def test_no_latex_stands_outside_of_equations(package):
    equations = 0
    for name in LISTED:
        text = getattr(package[target(name).path.removeprefix("deqseq.")].docstring, "value", "")
        prose, found = re.subn(r"^ *\$\$$.*?^ *\$\$$", "", text, flags=re.MULTILINE | re.DOTALL)
        prose, equations = re.sub(r"\$[^$]+\$", "", prose), equations + found
        assert not re.search(r"\.\. math|\\(frac|le|min|quad|left|mathrm)\b", prose), name
    assert equations > 20


def test_ranges_of_arguments_are_shown_in_words(package):
    """Ranges stand in the list of arguments, plain types in the signature."""

    def of(path, argument):
        sections = package[path].docstring.parse("google")
        (listed,) = [section for section in sections if section.kind.value == "parameters"]
        (shown,) = [each for each in listed.value if each.name == argument]
        return str(package[path].parameters[argument].annotation), str(shown.annotation)

    assert of("solvers.relaxed.Relaxed", "damping") == ("float", "float in (0, 2)")
    assert of("stop.Stop", "max_steps") == ("int", "int >= 1")
    assert of("start.RandomStart", "seed") == ("int | None", "int in [0, 2 ** 32 - 1] | None")
    assert of("fixed_point.fixed_point", "throw") == ("bool", "bool")
