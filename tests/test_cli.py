"""The command `vit-scratch`."""

import pytest

from hf_vit_scratch import cli
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import predict


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["vit-scratch", *argv])
    assert cli.main() == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in cli.COMMANDS)


def test_unknown_command_gets_the_list_and_an_error_code(capsys):
    assert cli.main(["predcit"]) == 2
    assert "unknown command 'predcit'. Did you mean predict?" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_that_names_it(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    assert f"usage: vit-scratch {command} " in capsys.readouterr().out


def test_arguments_and_exit_code_are_those_of_the_subcommand(monkeypatch):
    monkeypatch.setattr(predict, "main", lambda argv: 7 if argv == ["folder", "--top_k", "1"] else 0)
    assert cli.main(["predict", "folder", "--top_k", "1"]) == 7


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("No such model."), 2, "error: No such model."),
        (OSError("Disk full."), 2, "error: Disk full."),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["user", "system", "interrupt"],
)
def test_error_of_a_subcommand_is_one_line(error, code, line, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setattr(predict, "main", fail)
    assert cli.main(["predict"]) == code
    assert capsys.readouterr().err == f"vit-scratch predict: {line}\n"
