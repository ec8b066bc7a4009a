"""`tigon bench`: measure, store, show."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import against, report, step, store
from . import peers as peer_modules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `tigon bench`."""
    parser.add_argument("--op", action="append", default=[], help="operator; may be repeated; all when left out")
    parser.add_argument("--case", action="append", default=[], help="only cases of this name; may be repeated")
    parser.add_argument(
        "--peers",
        default=",".join(peer_modules.NAMES),
        help="implementations beside ours, comma-separated (default: %(default)s); those not installed are left out",
    )
    parser.add_argument(
        "--against", metavar="REV", help="also measure another version of tigon: a git revision, or a checkout's folder"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=25, help="launches of each implementation (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder for JSONL rows, for example benchmarks/results")
    parser.add_argument("--plot", action="store_true", help="also write a PNG and an SVG an operator beside the rows")
    parser.add_argument(
        "--readme", type=Path, help="measure nothing: rewrite the table in this file from the rows in --output"
    )
    step.add_arguments(parser.add_subparsers(dest="what", metavar="step"))


def run(arguments: argparse.Namespace) -> int:
    """Carry out `tigon bench`; the exit status."""
    if arguments.what == "step":
        return step.run(arguments)
    if arguments.readme is not None:
        if arguments.output is None:
            raise ValueError("bench: --readme: expected --output with the folder of the rows, got none")
        rows = report.rows_in(arguments.output)
        if not rows:
            raise ValueError(f"bench: --output: expected result rows below {arguments.output}, got none")
        report.write_into(arguments.readme, rows)
        print(f"wrote {arguments.readme}")
        return 0
    import torch

    from ..specs import all_specs
    from .run import measure_op

    specs = all_specs()
    unknown = [name for name in arguments.op if name not in specs]
    if unknown:
        raise ValueError(f"bench: --op: expected some of {', '.join(specs)}, got {', '.join(unknown)}")
    ops = arguments.op or list(specs)
    known = {case.name for name in ops for case in specs[name].cases}
    if not set(arguments.case) <= known:
        raise ValueError(f"bench: --case: expected some of {', '.join(sorted(known))}, got {', '.join(arguments.case)}")
    if arguments.rounds < 3:
        raise ValueError(f"bench: --rounds: expected at least 3, got {arguments.rounds}")
    chosen = peer_modules.peers(tuple(n for n in arguments.peers.split(",") if n))
    if arguments.against is not None:
        chosen = [against.load(arguments.against), *chosen]
    flags = [f"--op {name}" for name in arguments.op] + [f"--case {name}" for name in arguments.case]
    if arguments.peers != ",".join(peer_modules.NAMES):
        flags.append(f"--peers {arguments.peers}")
    if arguments.against is not None:
        flags.append(f"--against {arguments.against}")
    command = " ".join(["tigon bench", *flags, f"--dtype {arguments.dtype}", f"--rounds {arguments.rounds}"])
    for name in ops:
        named = tuple(c for c in arguments.case if c in {case.name for case in specs[name].cases})
        if arguments.case and not named:
            continue
        for rows in measure_op(
            specs[name],
            chosen,
            cases=named,
            dtype=getattr(torch, arguments.dtype),
            command=command,
            rounds=arguments.rounds,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        ):
            print("\n".join(report.text_table(rows).splitlines()[1:]), flush=True)
            # After every case, so that an interruption loses none that is finished.
            for path in store.write(rows, arguments.output) if arguments.output is not None else ():
                print(f"wrote {path}")
                if arguments.plot:
                    report.plot(store.read(path), path.with_suffix(".png"), path.with_suffix(".svg"))
    return 0
