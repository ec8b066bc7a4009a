"""Patch every language model class of transformers, and compare it with itself.

python -m tests.zoo [class ...] [--workers N] [--fuse] [--json FILE] [--table FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

# Plain torch on one thread each; read when the libraries are loaded.
os.environ.pop("TRITON_INTERPRET", None)
os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
import transformers

from tigon._progress import Progress
from tigon.patch._forms import FUSIONS

from .build import classes
from .sweep import sweep
from .table import render


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("classes", nargs="*", metavar="class", help="default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time (default: %(default)s)")
    parser.add_argument("--fuse", action="store_true", help="with every fusion across modules")
    parser.add_argument("--json", type=Path, help="write the records, one a line")
    parser.add_argument("--table", type=Path, help="write the table; needs all classes")
    args = parser.parse_args()
    unknown = sorted(set(args.classes) - set(classes()))
    if unknown:
        parser.error(f"no such language model class: {', '.join(unknown)}")
    if args.table and (args.classes or args.fuse):
        parser.error("--table needs all classes, patched as by default")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = args.classes or classes()
    progress = Progress("zoo", len(names))
    records = []
    for record in sweep(names, args.workers, fuse=FUSIONS if args.fuse else ()):
        records.append(record)
        progress.update(len(records), record["name"])
    if args.json:
        args.json.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    if args.table:
        args.table.write_text(render(records, names), encoding="utf-8")
    for record in records:
        for text in [f"does not train natively: {record['native']}"] if record["native"] else record["wrong"]:
            print(f"{record['name']}: {text}")
    wrong = sum(bool(record["wrong"]) for record in records)
    print(f"{len(records)} classes, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
