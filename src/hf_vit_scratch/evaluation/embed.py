"""Write one vector for each image in files, folders and globs: the pooled vector that a classifier reads.

    vit-scratch embed runs/digits photos --output vectors.parquet

The file has the columns `image`, the path, and `embedding`. A file that ends in .npz holds them as two arrays. The
vectors are those of `pipeline("image-feature-extraction", pool=True)`.

An image that cannot be decoded is named on standard error and left out. The exit code is 0, or 1 if there was such an
image, or 2 if the command cannot be carried out.
"""

import os

import numpy as np
import pyarrow
from pyarrow import parquet
from transformers import AutoModel

from ..data.images import local_path
from ..errors import UserError
from .predict import forward, load_pipeline, model_parser, name_broken, parse

PROGRAM = "vit-scratch embed"


def main(argv: list[str]) -> int:
    """Run `vit-scratch embed`; return the exit code."""
    parser = model_parser(PROGRAM, __doc__)
    parser.add_argument("--output", type=local_path, required=True, metavar="FILE", help="ends in .parquet or .npz")
    args, paths = parse(parser, argv)
    suffix = args.output.suffix.lower()
    if suffix not in (".parquet", ".npz"):
        raise UserError(f"--output must end in .parquet or .npz, got {args.output}.")
    encoder = load_pipeline("image-feature-extraction", AutoModel, "image encoder", args.model, args.device)
    names, vectors = [], []
    results = forward(encoder, ("pooler_output",), paths, args.batch_size, args.num_workers)
    for result in name_broken(PROGRAM, results, len(paths)):
        if "error" not in result:
            names.append(os.fsencode(result["image"]).decode(errors="replace"))  # a name may not be UTF-8
            vectors.append(result["pooler_output"].float().flatten().numpy().copy())  # without the other tokens
    if suffix == ".npz":
        with args.output.open("wb") as file:  # to a name, NumPy would add .npz after .NPZ
            np.savez(file, image=np.array(names), embedding=np.array(vectors))
    else:
        parquet.write_table(pyarrow.table({"image": names, "embedding": vectors}), args.output)
    print(f"{len(names)} vectors are in {args.output}.")
    return int(len(names) < len(paths))
