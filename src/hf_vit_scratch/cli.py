"""The command `vit-scratch`: one subcommand for each program of the package."""

import difflib
import importlib
import sys

COMMANDS = {
    "predict": ("evaluation.predict", "classify images in files, folders and globs"),
    "explain": ("interpretation.attention_maps", "draw what a model attends to in an image"),
    "explore": ("interpretation.explorer", "open a web page on which to look at attention"),
    "convert": ("conversion.convert", "convert a saved model of transformers, timm or torchvision"),
    "card": ("evaluation.model_card", "write one model card for several runs"),
}


def main() -> None:
    """Run the subcommand that the command line names. The others are not imported."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        module = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
        sys.exit(module.main(sys.argv[2:]))
    print("usage: vit-scratch COMMAND ...\n\ncommands (each takes --help):")
    for command, (_, what) in COMMANDS.items():
        print(f"  {command:10}{what}")
    if name not in ("-h", "--help"):
        guess = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {guess[0]}?" if guess else ""
        print(f"vit-scratch: unknown command {name!r}.{hint}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)
