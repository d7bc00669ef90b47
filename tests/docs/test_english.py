"""Phrases and names that prose and code avoid."""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PHRASES = (
    r"(?<!there )\b(?:is|are|was|were|be) no (?!longer\b|more\b|less\b)\w+",  # write "not a"
    r"\b(?:on|by|in|for|from|through|with) (?:[\w`.]+ ){1,4}alone\b",  # write "only"
    r"\bafresh\b|\blets? go\b|\bcomes? to the same\b|\bfor ever\b|\bwhoever\b|\bnobody\b",
    r"\bsuch that they keep\b|\bbooks are kept\b|\bneighbou?rs?\b|\bNone: (?:all|none)\b",
)
FRAGMENT = r"(?:of|that|which|who|whose|than|and|but|or|such that) "  # does not begin a sentence
CODE = re.compile(r"^ *```.*?^ *```|^ *(?:>>>|\.\.\.).*?$", re.DOTALL | re.MULTILINE)
NAMES = {"stand", "held", "given", "own", "again", "known", "due", "late", "young", "lost"}
NAMES |= {"together", "_asked", "_filed"}


def comments(text):
    """The comments of a module; full lines below each other are one."""
    blocks = []
    previous = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            is_line, line = token.line.lstrip().startswith("#"), token.start[0]
            if not (is_line and line == previous + 1):
                blocks.append("")
            blocks[-1] += token.string.lstrip("# ") + " "
            previous = line if is_line else 0
    return blocks


def places(path):
    """The phrases and names of a file that have to be replaced."""
    text = path.read_text()
    if path.suffix == ".md":
        paragraphs = CODE.sub("", text).split("\n\n")
    else:
        paragraphs = comments(text)
        yield from (f"# {comment}" for comment in paragraphs if re.match(FRAGMENT, comment))
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
                    if name in NAMES:
                        yield f"{name} ="
                case ast.Expr(ast.Constant(str(docstring))):
                    paragraphs.append(CODE.sub("", docstring))
    for paragraph in paragraphs:
        yield from re.findall("|".join(PHRASES), " ".join(paragraph.split()))


def found():
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("deqseq/**/*.py")]
    names = {str(path.relative_to(ROOT)).removeprefix("deqseq/"): path for path in sorted(files)}
    return {name: list(places(path)) for name, path in names.items()}


def test_phrases_and_names_are_avoided():
    assert {name: left for name, left in found().items() if left} == {}
