"""Translates docstrings from reStructuredText roles to Markdown, and types with ranges to words."""

import re
import textwrap
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin

from griffe import Docstring, Expr, ExprBinOp, ExprName, ExprSubscript, Extension, Module, Object

from deqseq import arguments

EQUATION = re.compile(  # beside the directive up to an empty line, or indented below it
    r"^( *)\.\. math::(?:[ ]+(\S.*(?:\n *\S.*)*)|[ ]*((?:\n(?:\1 +.*|[ ]*(?=\n\1 )))*))",
    flags=re.MULTILINE,
)
ROLE = re.compile(r":(math|class|func|meth|mod|attr|data|exc):`([^`]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", flags=re.MULTILINE)
NAMED = {
    name: get_args(value)
    for name, value in vars(arguments).items()
    if get_origin(value) is Annotated
}
"""Types with a range that have a name, such as ``PositiveInt``."""


class Markdown(Extension):
    """Rewrites each docstring after it is read, and annotations when all are."""

    def on_object(self, *, obj: Object, **more: Any) -> None:
        """Translate the docstring of one object."""
        if (docstring := obj.docstring) is not None:
            text = EQUATION.sub(display, docstring.value)
            text = ROLE.sub(lambda found: role(found, docstring), text)
            docstring.value = EXAMPLE.sub(
                r"\1Examples:", text
            )  # the plural is a section of code, else one of prose

    def on_package(self, *, pkg: Module, **more: Any) -> None:
        """Ranges of arguments: in the list of arguments, not in the signature."""
        pending: list[Object] = [pkg]
        while pending:
            here = pending.pop()
            members = [each for each in here.members.values() if isinstance(each, Object)]
            pending += members
            fields = [each for each in members if each.is_attribute]
            typed: Any = here.parameters if here.is_function else fields
            for each in typed:
                if isinstance(each.annotation, Expr):
                    each.annotation, text = without_range(each.annotation)
                    if here.docstring is not None and text != str(each.annotation):
                        line = re.compile(rf"^( +{each.name}):(?= )", flags=re.MULTILINE)
                        here.docstring.value = line.sub(
                            lambda found, text=text: f"{found[1]} ({text}):", here.docstring.value
                        )


def without_range(annotation: Any) -> tuple[Any, str]:
    """A type without its range, and with it, as in ``float in (0, 2)``."""
    if isinstance(annotation, ExprBinOp):
        (left, before), (right, after) = map(without_range, (annotation.left, annotation.right))
        both = replace(annotation, left=left, right=right)
        return both, f"{before} {annotation.operator} {after}"
    if isinstance(annotation, ExprName) and annotation.name in NAMED:
        kind, check = NAMED[annotation.name]
        return replace(annotation, name=kind.__name__), f"{kind.__name__} {as_range(check)}"
    if isinstance(annotation, ExprSubscript) and str(annotation.left) == "Annotated":
        kind, call = annotation.slice.elements
        ends = [str(end).strip("'\"") for end in call.arguments]
        return kind, f"{kind} {as_range(getattr(arguments, str(call.function))(*ends))}"
    return annotation, str(annotation)


def as_range(check: Any) -> str:
    """What follows the type."""
    if isinstance(check, arguments.Within):
        return f"in {check.interval}"
    return f">= {check.low}" if check.high is None else f"in [{check.low}, {check.high}]"


def display(found: re.Match[str]) -> str:
    """A displayed equation."""
    lines = (found[2] or found[3]).strip().splitlines()
    return textwrap.indent("\n".join(["$$", *map(str.strip, lines), "$$"]), found[1])


def role(found: re.Match[str], docstring: Docstring) -> str:
    """An inline equation, or a name that links to its page if there is one."""
    kind, text = found.groups()
    if kind == "math":
        return f"${text}$"
    path, name = text.lstrip("~"), text.rpartition(".")[2] if text.startswith("~") else text
    try:
        assert docstring.parent is not None
        path = docstring.parent.resolve(path)
    except Exception:  # griffe raises several of its own for a name that is not in this scope
        pass
    return f'<autoref optional identifier="{path}"><code>{name}</code></autoref>'
