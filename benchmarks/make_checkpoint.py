"""Make a checkpoint of random weights in the shape of a known model.

The numbers mean nothing, but its files are whole: `ortolan export` and llama.cpp take them, so
that a big shape can be measured without a download. The same seed gives the same weights in every
format, and no tensor is ever whole in memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from _checkpoint_files import GGUF_TYPES, write_folder, write_gguf
from _random_llama import SHAPES, Shape

FORMATS = ("safetensors", *GGUF_TYPES)


def make(out: Path, shape: Shape, file_format: str, seed: int = 0) -> int:
    """Write the folder (safetensors) or the file (GGUF) `out`; returns the bytes of its weights."""
    if file_format == "safetensors":
        return write_folder(out, shape, seed)
    return write_gguf(out, shape, GGUF_TYPES[file_format], seed)


def main() -> int:
    """Make one, and say what it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("shape", choices=SHAPES, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder or file to write")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], dest="file_format")
    parser.add_argument("--layers", type=int, metavar="N", help="default: as the model has")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} is there already; remove it, or choose another name")
    if not args.out.absolute().parent.is_dir():
        parser.error(f"{args.out.parent} is no folder; make it first")
    shape: Shape = SHAPES[args.shape]
    if args.layers is not None:
        if args.layers < 1:
            parser.error(f"--layers is {args.layers}; a model has at least 1")
        shape = replace(shape, layers=args.layers)
    if args.file_format != "safetensors" and shape.family != "llama":
        parser.error(f"{args.shape} is written as safetensors only")
    began_s = time.perf_counter()
    size = make(args.out, shape, args.file_format, args.seed)
    seconds = time.perf_counter() - began_s
    print(f"{args.out}: {args.shape}, {shape.layers} layers, {size / 1e9:.2f} GB, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
