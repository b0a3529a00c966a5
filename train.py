"""Train a Vision Transformer: `vit-scratch train` as a script, which launchers can start.

    python train.py                         the digits of scikit-learn, no network needed
    accelerate launch train.py cifar10_cpu  many devices

Without this file, `accelerate launch -m vit_scratch train cifar10_cpu` does the same.
"""

import sys
from functools import partial

import vit_scratch

PROGRAM = "python train.py"
main = partial(vit_scratch.load("hf_vit_scratch.training.run:main"), program=PROGRAM)

if __name__ == "__main__":
    sys.exit(vit_scratch.run(PROGRAM, main, sys.argv[1:]))
