"""The command `vit-scratch`: one subcommand for each program of the package."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from .errors import UserError

COMMANDS = {
    "predict": ("evaluation.predict", "classify images in files, folders and globs"),
    "explain": ("interpretation.attention_maps", "draw what a model attends to in an image"),
    "explore": ("interpretation.explorer.app", "open a web page on which to look at attention"),
    "convert": ("conversion.convert", "convert a saved model of transformers, timm or torchvision"),
    "card": ("evaluation.model_card", "write one model card for several runs"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand, importing no other, and return its exit code.

    Args:
        argv: Name and arguments of the subcommand; `None` for those of the process.
    """
    name, *arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        try:
            module = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
            return module.main(arguments) or 0
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its exit
            return 141  # 128 + SIGPIPE, as a shell reports it
        except (UserError, OSError) as error:
            print(f"vit-scratch {name}: error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print(f"vit-scratch {name}: interrupted", file=sys.stderr)
            return 130
    print("usage: vit-scratch COMMAND ...\n\ncommands (each takes --help):")
    for command, (_, what) in COMMANDS.items():
        print(f"  {command:10}{what}")
    if name in ("-h", "--help"):
        return 0
    guess = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f" Did you mean {guess[0]}?" if guess else ""
    print(f"vit-scratch: unknown command {name!r}.{hint}", file=sys.stderr)
    return 2
