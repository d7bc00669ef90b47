"""Every public name stands on one page of the API, and its docstring says what it must."""

import re
from pathlib import Path

import pytest
from api_docstrings import Public, Source, faults

ROOT = Path(__file__).parents[1]
PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md"))}
SOURCE = Source.below(ROOT / "deqseq")

# packages say by __all__ what is public; of these files it is every class and function without an underscore
WITHOUT_ALL = (
    "deqseq.integrations.pretrained",
    "deqseq.integrations.pretrained_config",
    "deqseq.integrations.checkpoints",
    "deqseq.integrations.reference_config",
    "deqseq.integrations.torchdeq",
    "deqseq.integrations.lm_eval",
)

NOT_FOR_USERS = {
    "deqseq.integrations.checkpoints.expected": "shared with pretrained.py",
    "deqseq.integrations.checkpoints.renamed": "shared with pretrained.py",
    "deqseq.integrations.checkpoints.without_tied_head": "shared with pretrained.py",
    "deqseq.integrations.pretrained_config.source_of": "shared with pretrained.py",
    "deqseq.integrations.lm_eval.check_request": "a check of SolvedLM's, tested on its own",
}

# what the checker would find, as patterns, and why it is right as it is
EXCEPTIONS = {
    r"ImplicitCache\.\w+: \w+ is not described": "transformers calls these methods, and documents them",
    r"CurriculumCallback\.on_\w+: \w+ is not described": "the Trainer calls these methods, and documents them",
    r"ImplicitCausalLM\.prepare_inputs_for_generation: \w+ is not described": "likewise, and its generate() calls it",
    r"SolvedLM\.\w+: \w+ is not described": "lm-eval calls these methods, and documents them",
    r"preset_table: no runnable Example": "it builds 25 models, which takes seconds: tests/test_presets.py runs it",
}


def public_names() -> dict[str, Public]:
    """By the shortest path under which each is handed out."""
    shortest: dict[str, tuple[str, Public]] = {}
    modules = [module for module in SOURCE.modules.values() if "__all__" in module.definitions]
    for module in [*modules, *(SOURCE.modules[name] for name in WITHOUT_ALL)]:
        for name in module.exported():
            path = f"{module.name}.{name}"
            found = SOURCE.find(path)
            assert found is not None, f"{path} is exported, and defined nowhere"
            known = shortest.get(found.path)
            if found.path not in NOT_FOR_USERS and (known is None or len(path) < len(known[0])):
                shortest[found.path] = path, found
    return dict(shortest.values())


def documented() -> list[str]:
    return [name for text in PAGES.values() for name in re.findall(r"^::: (\S+)$", text, flags=re.MULTILINE)]


def entry_of(name: str, found: Public) -> str:
    """What a page must say; for a name that is a module's too the page names the module, and links go to an anchor."""
    return found.path if name in SOURCE.modules else name


def excuses(fault: str) -> list[str]:
    return [pattern for pattern in EXCEPTIONS if re.search(rf"\.{pattern}", fault)]


NAMES = public_names()
SHOWN = {name: SOURCE.find(name) for name in documented()}


def test_every_public_name_is_on_exactly_one_page():
    listed = documented()
    assert sorted({name for name in listed if listed.count(name) > 1}) == []
    assert sorted({entry_of(*each) for each in NAMES.items()} - set(listed)) == []


def test_pages_list_what_there_is_and_by_its_shortest_name():
    assert [name for name, found in SHOWN.items() if found is None] == []
    shortest = {found.path: entry_of(name, found) for name, found in NAMES.items()}
    longer = {name: shortest[found.path] for name, found in SHOWN.items() if found and found.path in shortest}
    assert {name: short for name, short in longer.items() if name != short} == {}


def test_links_to_the_api_lead_to_an_entry():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "_tools" not in page.parts]
    wanted = {link for page in pages for link in re.findall(r"\]\[(deqseq\.[\w.]+)\]", page.read_text())}
    wanted |= {link for page in pages for link in re.findall(r"\[`?(deqseq\.[\w.]+)`?\]\[\]", page.read_text())}
    there = SHOWN.keys() | {
        name for text in PAGES.values() for name in re.findall(r"^\[\]\(\)\{#(\S+)\}$", text, re.MULTILINE)
    }
    assert sorted(name for name in NAMES if name in SOURCE.modules and name not in there) == []
    assert sorted(name for name in wanted if name not in there and name.rpartition(".")[0] not in there) == []


@pytest.mark.parametrize("name", sorted(SHOWN))
def test_the_docstring_says_all_it_must(name):
    found = SHOWN[name]
    assert found is not None
    assert [fault for fault in faults(found, SOURCE) if not excuses(fault)] == []


def test_every_exception_is_needed():
    said = [fault for found in SHOWN.values() if found for fault in faults(found, SOURCE)]
    assert sorted({pattern for fault in said for pattern in excuses(fault)}) == sorted(EXCEPTIONS)
    assert [name for name in NOT_FOR_USERS if SOURCE.find(name) is None or name in SHOWN] == []


GOOD = """
from torch import Tensor
from jaxtyping import Float
State = Float[Tensor, "batch dim"]

class Base:
    '''A base.

    Example:
        >>> Base()
    '''

    def step(self, z: State) -> State:
        '''The next point after ``z``, ``(batch, dim)``.'''

    def scale(self, by: int) -> int:
        '''Make it larger.

        Args:
            by: a factor.

        Returns:
            Something.
        '''

class Solver(Base):
    '''A solver.

    Args:
        damping: in (0, 1].

    Raises:
        ValueError: another damping.

    Example:
        >>> Solver(0.5)
    '''

    def __init__(self, damping: float, _hidden: int = 0):
        if damping > 1:
            raise ValueError

    def step(self, z: State) -> State:
        return z

    def scale(self, by: int) -> int:
        '''Larger.'''

    def limit(self, value: float) -> float:
        '''As far as `value` goes; TypeError for text.'''
        raise TypeError

@dataclass
class Record:
    '''What was found.

    Attributes:
        value: ``(batch, dim)``.
    '''

    value: State | None
    _own: int = 0

class SolveError(ValueError):
    '''It failed.'''

def solve(f: Callable[[State], State], z0: State, *rest: int) -> State:
    '''Solve it.

    Args:
        f: the map.
        z0: the start,
            ``(batch, dim)``.
        *rest: numbers.

    Returns:
        The fixed point.

    Raises:
        SolveError: it failed.

    Example:
        >>> solve(f, z0)
    '''
    def inner():
        raise KeyError
    assert inner
    raise SolveError("no")
"""


def found_in(text: str) -> list[str]:
    source = Source({"m": text})
    return [
        fault
        for name in source.modules["m"].exported()
        if (p := source.find(f"m.{name}"))
        for fault in faults(p, source)
    ]


def test_the_checker_has_nothing_to_say_of_what_is_complete():
    assert found_in(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("Solve it.", "Solve it", "m.solve: no summary that is a sentence"),
        ("It failed.'''", "'''", "m.SolveError: no summary that is a sentence"),
        ("        f: the map.\n", "", "m.solve: f is not described"),
        ("*rest: numbers", "*others: numbers", "m.solve: rest is not described"),
        ("*rest: numbers", "*others: numbers", "m.solve: others is described, but no parameter"),
        ("        damping: in (0, 1].\n", "", "m.Solver: damping is not described"),
        ("        value: ``(batch, dim)``.\n", "", "m.Record: value is not described"),
        ("value: ``(batch, dim)``.", "value: the state.", "m.Record: value is a tensor without a shape"),
        ("            ``(batch, dim)``.", "            a state.", "m.solve: z0 is a tensor without a shape"),
        ("after ``z``, ``(batch, dim)``", "after ``z``", "m.Base.step: z is a tensor without a shape"),
        ("            by: a factor.\n", "", "m.Solver.scale: by is not described"),
        ("after ``z``, ``(batch, dim)``", "after the present one", "m.Base.step: z is not described"),
        ("class Solver(Base)", "class Solver", "m.Solver.step: no summary that is a sentence"),
        ("    Returns:\n        The fixed point.\n\n", "", "m.solve: no Returns"),
        (
            "    Raises:\n        SolveError: it failed.\n\n",
            "",
            "m.solve: raises SolveError, which Raises does not list",
        ),
        (
            "    Raises:\n        ValueError: another damping.\n\n",
            "",
            "m.Solver: raises ValueError, which Raises does not list",
        ),
        ("; TypeError for text", "", "m.Solver.limit: raises TypeError, which Raises does not list"),
        ("    Example:\n        >>> solve(f, z0)\n", "", "m.solve: no runnable Example"),
        (
            ">>> Solver(0.5)",
            ">>> Solver(0.5)  # doctest: +SKIP",
            "m.Solver: no runnable Example, in the class or in a method",
        ),
        (
            "        damping: in (0, 1].\n",
            "        damp: in (0, 1].\n",
            "m.Solver: damp is described, but no parameter",
        ),
        (">>> Solver(0.5)", "Solver(0.5)", "m.Solver: no runnable Example, in the class or in a method"),
    ],
)
def test_the_checker_finds_what_is_left_out(old, new, fault):
    assert GOOD.count(old) == 1
    assert fault in found_in(GOOD.replace(old, new))
