"""The command `vit-scratch`."""

import gc
import os
import subprocess
import sys

import pytest

import vit_scratch
from hf_vit_scratch.errors import UserError
from hf_vit_scratch.evaluation import predict
from hf_vit_scratch.training.recipe import RECIPES


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(argv, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["vit-scratch", *argv])
    assert vit_scratch.main() == 0
    printed = capsys.readouterr().out
    assert all(f"  {command} " in printed for command in vit_scratch.COMMANDS)


@pytest.mark.parametrize("argv", [["--help"], ["recipes"], ["tarin"]])
def test_answer_without_a_model_needs_no_torch(argv):
    code = f"import sys, vit_scratch; vit_scratch.main({argv}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == 0


def test_letters_that_a_pipe_does_not_know_are_escaped():  # as on Windows
    code = "import vit_scratch; vit_scratch.run('vit-scratch', lambda argv: print('猫'), [])"
    command = [sys.executable, "-X", "utf8=0", "-c", code]
    printed = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "cp1252"}, check=True)
    assert printed.stdout.split() == [rb"\u732b"]


def test_imports_are_left_to_the_end_of_the_process():
    code = "import gc, vit_scratch; vit_scratch.load('hf_vit_scratch.errors:UserError')"
    code += "; assert gc.isenabled() and gc.get_freeze_count() > 100_000"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_command_of_an_imported_package_leaves_the_collector_alone():
    frozen = gc.get_freeze_count()
    assert vit_scratch.load("hf_vit_scratch.errors:UserError") is UserError
    assert gc.get_freeze_count() == frozen


def test_unknown_command_gets_the_list_and_an_error_code(capsys):
    assert vit_scratch.main(["predcit"]) == 2
    assert "unknown command 'predcit'. Did you mean predict?" in capsys.readouterr().err


@pytest.mark.parametrize("command", vit_scratch.COMMANDS)
def test_every_command_has_a_help_that_names_it(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        vit_scratch.main([command, "--help"])
    assert f"usage: vit-scratch {command} " in capsys.readouterr().out


def test_recipes_are_listed_with_purpose_and_result(capsys):
    assert vit_scratch.main(["recipes"]) == 0
    listed = capsys.readouterr().out.split("\n\n")
    names = [entry.partition("\n")[0] for entry in listed]
    assert sorted(names[:-1]) == sorted(path.stem for path in RECIPES.glob("*.yaml"))
    (digits,) = (entry for entry in listed if entry.startswith("digits\n"))
    assert "a small ViT on 1,797 real handwritten digits" in digits
    assert "Result    test accuracy 9" in digits
    assert "learned positions" not in digits  # the header goes on with sources and trials
    assert names.index("your_images") < names.index("cifar10_bert_tutorial")  # which was not run


def test_arguments_and_exit_code_are_those_of_the_subcommand(monkeypatch):
    monkeypatch.setattr(predict, "main", lambda argv: 7 if argv == ["folder", "--top_k", "1"] else 0)
    assert vit_scratch.main(["predict", "folder", "--top_k", "1"]) == 7


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
    assert vit_scratch.main(["predict"]) == code
    assert capsys.readouterr().err == f"vit-scratch predict: {line}\n"


def test_fault_of_the_program_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(predict, "main", lambda argv: [].pop())
    with pytest.raises(IndexError, match="pop from empty list"):
        vit_scratch.main(["predict"])
