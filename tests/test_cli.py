"""The command `vit-scratch`."""

import importlib

import pytest

from hf_vit_scratch import cli


def run(monkeypatch, *argv):
    """Run the command and return its exit code."""
    monkeypatch.setattr("sys.argv", ["vit-scratch", *argv])
    with pytest.raises(SystemExit) as error:
        cli.main()
    return error.value.code


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv, monkeypatch, capsys):
    assert run(monkeypatch, *argv) == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in cli.COMMANDS)


def test_unknown_command_gets_the_list_and_an_error_code(monkeypatch, capsys):
    assert run(monkeypatch, "predcit") == 2
    assert "unknown command 'predcit'. Did you mean predict?" in capsys.readouterr().err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_help_that_names_it(command, monkeypatch, capsys):
    assert run(monkeypatch, command, "--help") == 0
    assert f"usage: vit-scratch {command} " in capsys.readouterr().out


def test_arguments_and_exit_code_are_those_of_the_subcommand(monkeypatch):
    module = importlib.import_module("hf_vit_scratch.evaluation.predict")
    monkeypatch.setattr(module, "main", lambda argv: 7 if argv == ["folder", "--top_k", "1"] else 0)
    assert run(monkeypatch, "predict", "folder", "--top_k", "1") == 7
