"""What a public docstring must say, checked on the source alone: nothing is imported.

- A summary: its first paragraph is a sentence.
- ``Args``: every parameter of a function, method or constructor and every field of a dataclass, and nothing that is
  none. Records may list their fields as ``Attributes``. A method may be said in prose that names each parameter.
- A shape in backticks where a parameter or field is a tensor: ``(batch, length)``.
- ``Returns`` or ``Yields`` beside ``Args``, unless the summary names a result that is no tensor: "The ...", "A ...".
- ``Raises``: every exception that the function's own body, or the constructor's, raises by name.
- ``Example``: with a line that runs, for every function and class, where one of a method will do. Not for what only
  the library makes: records with ``Attributes`` alone, exceptions and warnings.

A method that overrides another has what that one's docstring says.
"""

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Warns", "References", "Example")
RESULTS = ("A ", "An ", "The ", "Whether ")  # how a summary begins that names what is returned
NEVER_SEEN = ("AssertionError", "NotImplementedError")  # what cannot be, and what a subclass replaces
OUTSIDE_ERRORS = ("Exception", "Error", "Warning")


@dataclass(frozen=True)
class Module:
    """One file: what it defines, what it imports, and the string below each of its constants."""

    name: str
    definitions: dict[str, Definition]
    imports: dict[str, tuple[str, str]]
    notes: dict[str, str]

    def exported(self) -> list[str]:
        """The names of ``__all__``; without one, the public classes and functions that the file itself defines."""
        listed = self.definitions.get("__all__")
        if isinstance(listed, ast.Assign):
            return ast.literal_eval(listed.value)
        classes_and_functions = (Function, ast.ClassDef)
        return [k for k, v in self.definitions.items() if isinstance(v, classes_and_functions) and k[0] != "_"]


@dataclass(frozen=True)
class Public:
    """A public name: where it is defined, and by what."""

    module: Module
    name: str
    node: Definition

    @property
    def path(self) -> str:
        return f"{self.module.name}.{self.name}"


class Source:
    """All files of a package."""

    def __init__(self, files: dict[str, str]) -> None:
        self.modules = {name: read(name, text) for name, text in files.items()}

    @classmethod
    def below(cls, folder: Path) -> "Source":
        files = {}
        for file in folder.rglob("*.py"):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = file.read_text()
        return cls(files)

    def find(self, path: str) -> Public | None:
        """Where a dotted path is defined, however often it is handed on; None: nowhere here."""
        module, _, name = path.rpartition(".")
        if module not in self.modules:
            return None
        here = self.modules[module]
        if name in here.definitions:
            return Public(here, name, here.definitions[name])
        return self.find(".".join(here.imports[name])) if name in here.imports else None

    def bases(self, public: Public) -> Iterator[Public]:
        """The class and its bases in the package."""
        yield public
        for base in public.node.bases if isinstance(public.node, ast.ClassDef) else ():
            name = base.value if isinstance(base, ast.Subscript) else base
            found = self.find(f"{public.module.name}.{name.id}") if isinstance(name, ast.Name) else None
            if found is not None:
                yield from self.bases(found)

    def is_tensor(self, annotation: ast.expr | None, module: Module) -> bool:
        """Whether an annotation is of a tensor, or of one of several types of which one is."""
        match annotation:
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left, module) or self.is_tensor(right, module)
            case ast.Subscript(slice=ast.Tuple(elts=[ast.Name(id="Tensor"), *_])):
                return True
            case ast.Name(id="Tensor"):
                return True
            case ast.Name(id=name):
                found = self.find(f"{module.name}.{name}")
                alias = None if found is None else getattr(found.node, "value", None)
                return found is not None and alias is not None and self.is_tensor(alias, found.module)
        return False


def read(name: str, text: str) -> Module:
    """One file as a module."""
    module = Module(name, {}, {}, {})
    body = ast.parse(text).body
    for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                module.definitions[statement.name] = statement
            case ast.Assign(targets=[ast.Name(id=target)]) | ast.AnnAssign(target=ast.Name(id=target)):
                module.definitions[target] = statement
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    module.notes[target] = str(after.value.value)
            case ast.ImportFrom(module=str(origin), names=names):
                module.imports.update({alias.asname or alias.name: (origin, alias.name) for alias in names})
    return module


@dataclass(frozen=True)
class Docstring:
    """A docstring, taken apart: its prose, and its sections by title."""

    prose: str
    sections: dict[str, str]

    @classmethod
    def of(cls, text: str | None) -> "Docstring":
        parts = re.split(rf"^({'|'.join(SECTIONS)}):$", text or "", flags=re.MULTILINE)
        return cls(parts[0].strip(), dict(zip(parts[1::2], parts[2::2], strict=True)))

    @property
    def summary(self) -> str:
        return self.prose.split("\n\n")[0]

    def items(self, *titles: str) -> dict[str, str]:
        """What sections of the form ``name: description`` say of each name; several names may share a description."""
        found: dict[str, str] = {}
        for title in titles:
            for names, description in re.findall(
                r"^ {4}([*\w., ]+): (.+(?:\n(?: {5}.*|\s*$))*)", self.sections.get(title, ""), flags=re.MULTILINE
            ):
                found |= {name.strip(" *"): description for name in names.split(",")}
        return found


def faults(public: Public, source: Source) -> list[str]:
    """What the docstring of a public name leaves out, its public methods included."""
    node, module = public.node, public.module
    if isinstance(node, ast.ClassDef):
        return list(_class_faults(public, source))
    if isinstance(node, Function):
        return list(_function_faults(node, public, source))
    note = module.notes.get(public.name)
    return list(_summary_faults(public.path, Docstring.of(note)))


def _class_faults(public: Public, source: Source) -> Iterator[str]:
    node = public.node
    assert isinstance(node, ast.ClassDef)
    doc = Docstring.of(ast.get_docstring(node))
    yield from _summary_faults(public.path, doc)
    described = doc.items("Args", "Attributes")
    methods = [part for part in node.body if isinstance(part, Function)]
    constructors = [method for method in methods if method.name in ("__init__", "__post_init__")]
    wanted = _fields(node) if _has_fields(node) else {}
    for method in constructors:
        wanted |= _parameters(method) if method.name == "__init__" else {}
        yield from _raise_faults(public.path, method, doc)
    if not _is_error(node):
        yield from _parameter_faults(public.path, public.module, wanted, described, source)
        yield from _strangers(public.path, wanted or described, doc.items("Args"))
    public_methods = [method for method in methods if method.name[0] != "_"]
    for method in public_methods:
        yield from _function_faults(method, public, source)
    texts = [doc, *(Docstring.of(ast.get_docstring(method)) for method in public_methods)]
    made_by_the_library = _is_error(node) or {"Attributes"} == {"Args", "Attributes"} & set(doc.sections)
    if not made_by_the_library and not any(_has_example(text) for text in texts):
        yield f"{public.path}: no runnable Example, in the class or in a method"


def _function_faults(node: Function, public: Public, source: Source) -> Iterator[str]:
    """Those of a function, or of a method of the class ``public``."""
    is_method = node is not public.node
    path = f"{public.path}.{node.name}" if is_method else public.path
    text = ast.get_docstring(node)
    inherited = [] if not is_method else _docstrings(public, node.name, source)
    if text is None and inherited:
        return  # the base class says it
    doc, wanted = Docstring.of(text), _parameters(node)
    yield from _summary_faults(path, doc)
    yield from _raise_faults(path, node, doc)
    described = doc.items("Args")
    if is_method and "Args" not in doc.sections:  # the short form: prose, or a base, says it of the parameters
        for each in (doc, *inherited):
            said = each.items("Args") or {name: each.prose for name in wanted if f"`{name}`" in each.prose}
            described = {name: text for name, text in said.items() if name in wanted} | described
    yield from _parameter_faults(path, public.module, wanted, described, source)
    yield from _strangers(path, wanted, described)
    gives = node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn")
    named = doc.summary.startswith(RESULTS) and not source.is_tensor(node.returns, public.module)
    if gives and "Args" in doc.sections and not named and not {"Returns", "Yields"} & set(doc.sections):
        yield f"{path}: no Returns"
    if not is_method and not _has_example(doc):
        yield f"{path}: no runnable Example"


def _summary_faults(path: str, doc: Docstring) -> Iterator[str]:
    if not re.fullmatch(r"[^\s].*[.:?]", doc.summary, flags=re.DOTALL):
        yield f"{path}: no summary that is a sentence"


def _parameter_faults(
    path: str, module: Module, wanted: dict[str, ast.expr | None], described: dict[str, str], source: Source
) -> Iterator[str]:
    for name, annotation in wanted.items():
        if name not in described:
            yield f"{path}: {name} is not described"
        elif source.is_tensor(annotation, module) and not re.search(r"`\([^`]*\)`", described[name]):
            yield f"{path}: {name} is a tensor without a shape"


def _strangers(path: str, wanted: Collection[str], described: Collection[str]) -> Iterator[str]:
    for name in sorted(set(described) - set(wanted)):
        yield f"{path}: {name} is described, but no parameter"


def _raise_faults(path: str, node: Function, doc: Docstring) -> Iterator[str]:
    listed = doc.items("Raises") if doc.sections else dict.fromkeys(re.findall(r"\w+", doc.prose), "")
    for name in sorted({name for statement in _own(node) if (name := _raised(statement))}):
        if name not in listed:
            yield f"{path}: raises {name}, which Raises does not list"


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without those of functions inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*Function.__args__, ast.Lambda, ast.ClassDef)):
            yield child
            yield from _own(child)


def _raised(statement: ast.AST) -> str | None:
    """The public class that a ``raise`` names; None: it is no such statement, or says that this cannot be."""
    if not isinstance(statement, ast.Raise):
        return None
    error = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
    match error:
        case ast.Name(id=name) if name[0] != "_" and name not in NEVER_SEEN:
            return name
    return None


def _parameters(node: Function) -> dict[str, ast.expr | None]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg]
    named = {argument.arg: argument.annotation for argument in every if argument is not None}
    return {name: kind for name, kind in named.items() if name not in ("self", "cls") and name[0] != "_"}


def _fields(node: ast.ClassDef) -> dict[str, ast.expr | None]:
    """The public fields of a record."""
    fields = (part for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name))
    found = {field.target.id: field.annotation for field in fields if isinstance(field.target, ast.Name)}
    return {name: kind for name, kind in found.items() if name[0] != "_" and "ClassVar" not in ast.unparse(kind)}


def _has_fields(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    names = {ast.unparse(mark.func if isinstance(mark, ast.Call) else mark) for mark in marks}
    return bool(names & {"dataclass", "NamedTuple", "strict", "TypedDict"})


def _is_error(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith(OUTSIDE_ERRORS) for base in node.bases)


def _docstrings(public: Public, method: str, source: Source) -> list[Docstring]:
    """What the class and its bases say of a method, as far as they say anything."""
    classes = [base.node for base in source.bases(public) if isinstance(base.node, ast.ClassDef)]
    methods = [x for node in classes for x in node.body if isinstance(x, Function) and x.name == method]
    return [Docstring.of(text) for x in methods if (text := ast.get_docstring(x))]


def _has_example(doc: Docstring) -> bool:
    """Whether there is a line that runs as a test."""
    return bool(re.search(r">>> (?!.*# doctest: \+SKIP)", doc.sections.get("Example", "")))
