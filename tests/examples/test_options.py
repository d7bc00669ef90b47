"""Bad command lines of the synthetic examples end with an error that names the option, and nothing
is written.
"""

import re
from typing import get_args, get_type_hints

import catbabi
import formal_languages
import pretrain
import puzzles
import pytest
import reasoning
import retrofit
import state_tracking
import tyro

SCRIPTS = {
    "state_tracking": state_tracking,
    "formal_languages": formal_languages,
    "catbabi": catbabi,
    "reasoning": reasoning,
}
BAD = {int: ("1.5", "-1"), float: ("nan", "-1")}


def bad_numbers():
    """Every option that is a number, or several, with values that no number may have."""
    for script, module in (("state_tracking", state_tracking), ("catbabi", catbabi)):
        for name, hint in get_type_hints(module.Options).items():
            kind, *_ = get_args(hint) or [hint]
            for bad in BAD.get(kind, ()):
                yield script, f"--{name.replace('_', '-')}", bad


def refused(script, arguments, folder, capsys):
    """What the script said."""
    with pytest.raises(SystemExit) as caught:
        SCRIPTS[script].main([*arguments, "--output", str(folder / "out")])
    assert caught.value.code == 2
    assert not list(folder.iterdir())
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    "module", [*SCRIPTS.values(), pretrain, puzzles, retrofit], ids=lambda module: module.__name__
)
def test_help_tells_what_each_option_is(module, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(module.Options, args=["--help"])
    said = " ".join(re.sub(r"│|\{[^}]*\}", " ", capsys.readouterr().out).split())
    assert "--seed INT" in said
    assert re.findall(r"(?<!default: )(--[\w-]+)[^a-z]*\(default", said) == []


@pytest.mark.parametrize(("script", "option", "value"), list(bad_numbers()))
def test_numbers_out_of_range(script, option, value, tmp_path, capsys):
    assert option in refused(script, [option, value], tmp_path, capsys)


@pytest.mark.parametrize(
    ("script", "line", "message"),
    [
        ("state_tracking", "--steps -5", "--steps must be an integer in 1..1000000000, got -5"),
        ("state_tracking", "--learned 1.5", "--learned must be a number in [0, 1], got 1.5"),
        ("state_tracking", "--device gpu7", "--device must be one of ['cpu'"),
        ("state_tracking", "--eval-lengths", "--eval-lengths must have at least one value"),
        ("state_tracking", "--lengths 3 2", "--lengths must ascend, got (3, 2)"),
        ("state_tracking", "--baselines 2 2", "--baselines must have every value once"),
        ("state_tracking", "--baselines rnn", "--baselines must be numbers of blocks, lstm, gru"),
        ("state_tracking", "--baselines 0", "--baselines must be numbers of blocks, lstm, gru"),
        ("reasoning", "--baseline-lrs 0.1 -1", "--baseline-lrs must be a number"),
        ("reasoning", "--task cups", "--task"),
        ("state_tracking", "--group Q9", "name must be Zn, Sn, An or Dn"),
        ("state_tracking", "--group M --generators 1", "--generators: count must be one for"),
        (
            "state_tracking",
            "--group M --identity-probability 0.5",
            "--identity-probability: identity_probability must",
        ),
        (
            "state_tracking",
            "--group M --eval-identity-probability 0.5",
            "--eval-identity-probability: identity",
        ),
        (
            "state_tracking",
            "--identity-probability",
            "--identity-probability must have at least one value",
        ),
        ("state_tracking", "--headdim 7", "headdim must divide"),
        ("state_tracking", "--backbone mamba", "--backbone"),
        ("state_tracking", "--stepz 5", "--steps"),
        ("formal_languages", "--task parity", "--task must be one of even_pairs, parity_check"),
        ("catbabi", "--blocks", "--blocks must have at least one value"),
    ],
)
def test_the_error_names_the_option_and_the_remedy(script, line, message, tmp_path, capsys):
    assert message in refused(script, line.split(), tmp_path, capsys)


@pytest.mark.parametrize("script", SCRIPTS)
def test_several_processes_are_refused(script, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = rf"^{script}.py runs in one process: .* python examples/{script}.py"
    with pytest.raises(SystemExit, match=message):
        SCRIPTS[script].main(["--quick", "--output", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())
