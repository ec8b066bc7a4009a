"""python -m tests.zoo [classes ...] [--json FILE] [--workers N]"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import transformers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo")
    parser.add_argument("classes", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    from .build import classes
    from .sweep import sweep

    names = args.classes or classes()
    out = args.json.open("w") if args.json else None
    bad = 0
    for i, record in enumerate(sweep(names, args.workers), 1):
        if out:
            out.write(json.dumps(record) + "\n")
            out.flush()
        if record["native"] or record["wrong"]:
            bad += 1
            print(f"{i}/{len(names)} {record['name']}: {record['native'] or record['wrong']}", flush=True)
        elif i % 20 == 0:
            print(f"{i}/{len(names)}", file=sys.stderr, flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
