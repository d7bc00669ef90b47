"""Bad command lines end at once with an error that names the option, and nothing is written.

They are made from the options of every script: wrong types, numbers out of range, NaN, infinity, empty and unknown
values, misspelt names and values, files that are missing or of the wrong kind.
"""

import importlib.util
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
import tyro

ROOT = Path(__file__).parents[2]
BENCHMARKS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]
BAD: dict[Any, tuple[str, ...]] = {
    int: ("1.5", "-1", "9" * 20),
    float: ("much", "-1", "nan", "inf"),
    str: ("",),
}
UNKNOWN = {  # values of options that are text; "file" is a file, "folder" a folder
    "backend": ("mamba", ""),
    "data": ("nowhere", "file"),
    "device": ("gpu7", "CPU", "cuda:99:1"),
    "group": ("Q9", "Z0", "Z2xx"),
    "json": ("folder", "file/rows.json"),
    "output": ("file", "file/run", "link"),
    "task": ("parity", "tomita"),
}


class Script(NamedTuple):
    """How a script reads its command line, the types of its options, and a beginning that is right."""

    read: Callable[[list[str]], Any]
    hints: dict[str, Any]
    begin: tuple[str, ...] = ()


def load(path: Path) -> Any:
    """A script as a module, under another name: other packages are called evaluate, too."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def scripts() -> dict[str, Script]:
    """All scripts of examples/, and the two command lines of benchmarks/."""
    names = ("parity", "catbabi", "state_tracking", "formal_languages")
    modules = {name: load(ROOT / "examples" / f"{name}.py") for name in names}
    parity = modules.pop("parity").main
    hints = {name: get_type_hints(parity)[name] for name in inspect.signature(parity).parameters}
    found = {"parity": Script(lambda given: tyro.cli(parity, args=given), hints)}
    begins = {"catbabi": ("--quick",)}
    for name, module in modules.items():
        found[name] = Script(module.read_options, get_type_hints(module.Options), begins.get(name, ()))
    shared = {"quick": bool, "json": str}
    for path in BENCHMARKS:
        found[path.stem] = Script(partial(call_main, path), shared)
    found["gpu"] = found["gpu"]._replace(hints=shared | {"device": str, "backend": str})
    return found


def call_main(path: Path, given: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        patch.setattr(sys, "argv", [str(path), *given])
        module = sys.modules.get(f"script_{path.stem}") or load(path)
        module.main()


def bad_lines(script: Script) -> Iterator[tuple[str, list[str]]]:
    """The option that is wrong, and the command line."""
    for name, hint in script.hints.items():
        flag = f"--{name.replace('_', '-')}"
        misspelt = f"{flag[:-2]}{flag[-1]}{flag[-2]}z"
        yield misspelt, [*script.begin, misspelt, "1"]
        kind = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint  # without None
        many = get_origin(kind) is tuple
        kind = get_args(kind)[0] if many else kind
        if kind is bool:
            yield "maybe", [*script.begin, f"{flag}=maybe"]
        elif get_origin(kind) is Literal:
            first = get_args(kind)[0]
            yield from ((flag, [*script.begin, flag, value]) for value in ("", f"{first}x", "unknown"))
        else:
            text = name in ("models", "corpus") and "quick" in script.hints
            unknown = UNKNOWN.get(name, ()) if kind is str or text else ()
            if "device" not in script.hints:  # parity.py removes nothing, and may write through a link
                unknown = tuple(value for value in unknown if value != "link")
            for value in (*BAD[kind], *unknown):
                yield flag, [*script.begin, flag, value]
            if many and kind is int:
                yield flag, [*script.begin, flag, "1", "-1"]


def outcome(read: Callable[[list[str]], Any], wrong: str, given: list[str]) -> str:
    """``clear``: an error that names what is wrong; ``obscure``: another one; ``silent``: none."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(printed):
            read(given)
    except (SystemExit, ValueError, TypeError) as error:
        if isinstance(error, SystemExit) and error.code in (0, None):
            return "silent"
        said = re.sub(r"[│\s]+", " ", f"{printed.getvalue()} {error}")
        return "clear" if re.search(rf"(?<![\w-]){re.escape(wrong)}(?![\w-])", said) else f"obscure: {said.strip()}"
    except Exception as error:
        return f"obscure: {type(error).__name__}: {error}"
    return "silent"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a file, a folder and a link to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    return tmp_path


SCRIPTS = scripts()


@pytest.mark.parametrize("name", SCRIPTS)
def test_bad_command_lines_are_refused_and_nothing_is_written(name, place):
    lines, before = list(bad_lines(SCRIPTS[name])), sorted(os.walk(place))
    found = {" ".join(map(repr, given)): outcome(SCRIPTS[name].read, wrong, given) for wrong, given in lines}
    assert {line: how for line, how in found.items() if how != "clear"} == {}
    assert sorted(os.walk(place)) == before


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("catbabi", "--data folder --paper --test-stories 8", "--test-stories has no effect with --data"),
        ("state_tracking", "--heads 2", "--heads has no effect with --backbone mamba2"),
        ("state_tracking", "--gradient implicit --phantom-steps 2", "--phantom-steps has no effect with --gradient"),
    ],
    ids=str,
)
def test_an_option_without_effect_is_refused(name, given, why, place):
    with pytest.raises(SystemExit, match=f"^{re.escape(why)}.*: leave it out$"):
        SCRIPTS[name].read(given.split())


@pytest.mark.parametrize("name", ["parity", "catbabi", "state_tracking", "formal_languages"])
def test_several_processes_are_refused_and_nothing_is_written(name, place, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    begin = () if name == "parity" else (["--quick"],)
    with pytest.raises(SystemExit, match=rf"^{name}.py runs in one process: .* python examples/{name}.py"):
        sys.modules[f"script_{name}"].main(*begin)
    assert sorted(path.name for path in place.iterdir()) == ["file", "folder", "link"]


def test_there_are_enough_of_them():
    assert sum(len(list(bad_lines(script))) for script in SCRIPTS.values()) >= 500


def test_every_number_has_a_range():
    """An option of a plain int or float would take any."""

    def unruled(hint: Any) -> bool:
        inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
        if get_origin(hint) is Annotated and inner[0] in (int, float):
            return False
        return hint in (int, float) or any(map(unruled, inner))

    for name in ("catbabi", "state_tracking", "formal_languages"):
        hints = get_type_hints(sys.modules[f"script_{name}"].Options, include_extras=True)
        checked_by_name = {"tasks"} if name == "catbabi" else set()
        assert {option for option, hint in hints.items() if unruled(hint)} == checked_by_name
