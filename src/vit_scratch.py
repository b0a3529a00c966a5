"""The command `vit-scratch`: one subcommand for each program of the package `hf_vit_scratch`.

It stands beside the package, because importing the package loads torch. The list of commands answers at once.
"""

import argparse
import difflib
import gc
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

COMMANDS = {
    "recipes": ("vit_scratch:list_recipes", "list the recipes, what each is for and its result"),
    "train": ("hf_vit_scratch.training.run:main", "train a model with a recipe"),
    "evaluate": ("hf_vit_scratch.training.evaluate:main", "test a model on labelled images, and write a report"),
    "predict": ("hf_vit_scratch.evaluation.predict:main", "classify images in files, folders and globs"),
    "embed": ("hf_vit_scratch.evaluation.embed:main", "write one vector for each image"),
    "explain": ("hf_vit_scratch.interpretation.attention_maps:main", "draw what a model attends to in an image"),
    "explore": ("hf_vit_scratch.interpretation.explorer.app:main", "show attention on a local web page"),
    "export": ("hf_vit_scratch.training.export:main", "export to ONNX Runtime or OpenVINO, and check the answers"),
    "convert": ("hf_vit_scratch.conversion.convert:main", "convert a model of transformers, timm or torchvision"),
    "card": ("hf_vit_scratch.evaluation.model_card:main", "write one model card for several runs"),
}
HELP = """usage: vit-scratch COMMAND ...

commands (each takes --help):
{}

Begin with `vit-scratch train`, which needs no data, or with `vit-scratch train your_images --data FOLDER`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Import and run the subcommand of `argv` alone, by default that of the process, and return its exit code."""
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        return run(f"vit-scratch {name}", lambda argv: load(COMMANDS[name][0])(argv), arguments)
    print(HELP.format("\n".join(f"  {command:10}{what}" for command, (_, what) in COMMANDS.items())))
    if name in ("-h", "--help"):
        return 0
    guess = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {guess[0]}?" if guess else ""
    print(f"vit-scratch: unknown command {name!r}.{hint}", file=sys.stderr)
    return 2


def load(path: str) -> Callable[..., Any]:
    """Import a function of the package, without collecting garbage: what the imports make stays to the end."""
    if "hf_vit_scratch" in sys.modules or not gc.isenabled():
        return resolve_name(path)
    gc.disable()
    try:
        return resolve_name(path)
    finally:
        gc.freeze()
        gc.enable()


def run(program: str, command: Callable[[list[str]], Any], argv: list[str]) -> int:
    """Run a command and return its exit code. A mistake of the user is printed as one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe of Windows may not know the letters of a class
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        result = command(argv)
        return result if isinstance(result, int) else 0  # training returns its metrics
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its exit
        return 141  # 128 + SIGPIPE, as a shell reports it
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT
    except Exception as error:
        from hf_vit_scratch.errors import UserError

        if not isinstance(error, UserError | OSError):
            raise
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2


def list_recipes(argv: list[str]) -> None:
    """Run `vit-scratch recipes`: print the headers of the recipes, first of those that were run."""
    parser = argparse.ArgumentParser(prog="vit-scratch recipes", description=COMMANDS["recipes"][1].capitalize() + ".")
    parser.parse_args(argv)
    folder = Path(__file__).with_name("hf_vit_scratch") / "recipes"
    headers = {path.stem: path.read_text(encoding="utf-8").partition("# Source")[0] for path in folder.glob("*.yaml")}
    for name, header in sorted(headers.items(), key=lambda recipe: ("Result    not run" in recipe[1], recipe[0])):
        print(name, re.sub("^# ?", "    ", header, flags=re.MULTILINE), sep="\n")
    print(f"The files are in {folder}. Flags of `vit-scratch train NAME` override them.")


if __name__ == "__main__":  # accelerate launch -m vit_scratch train RECIPE
    sys.exit(main())
