"""The command `vit-scratch`: one subcommand for each program of the package."""

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
    """Run the subcommand that the command line names; import nothing of the others."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in COMMANDS:
        print("usage: vit-scratch COMMAND ...\n\ncommands (each takes --help):")
        for command, (_, what) in COMMANDS.items():
            print(f"  {command:10}{what}")
        sys.exit(0 if name in ("-h", "--help") else 2)
    module = importlib.import_module(f".{COMMANDS[name][0]}", __package__)
    sys.exit(module.main(sys.argv[2:]))
