"""Translates the library's docstrings from reStructuredText roles to Markdown."""

import re
import textwrap
from typing import Any

from griffe import Docstring, Extension, Object

EQUATION = re.compile(
    r"^( *)\.\. math::[ ]*(.*(?:\n(?:\1 +.*|[ ]*(?=\n\1 )))*)", flags=re.MULTILINE
)
ROLE = re.compile(r":(math|class|func|meth|mod|attr|data|exc):`([^`]+)`")
EXAMPLE = re.compile(r"^( *)Example:$", flags=re.MULTILINE)


class Markdown(Extension):
    """Rewrites each docstring after it is read."""

    def on_object(self, *, obj: Object, **more: Any) -> None:
        """Translate the docstring of one object."""
        if (docstring := obj.docstring) is not None:
            text = EQUATION.sub(display, docstring.value)
            text = ROLE.sub(lambda found: role(found, docstring), text)
            docstring.value = EXAMPLE.sub(
                r"\1Examples:", text
            )  # the plural is a section of code, else one of prose


def display(found: re.Match[str]) -> str:
    """A displayed equation."""
    return textwrap.indent(f"$$\n{textwrap.dedent(found[2]).strip()}\n$$", found[1])


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
