"""`tigon bench step`: whole training steps of one model, as it is and with each package that makes it faster."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import step_rows, store
from .step_rows import LongestRow, StepRow
from .step_train import ATTENTION, Plan, find_longest, measure
from .step_variants import DEFAULT, VARIANTS, Variant
from .timing import spread

_HELP = """Train a model with random weights on real text, a process for each variant, and report tokens/s, peak memory,
the loss of every step, the time to the first step and where the time goes. A variant that runs out of memory
gets a row that says so."""


def add_arguments(commands: Any) -> None:
    """Declare `tigon bench step`."""
    parser = commands.add_parser(
        "step",
        help="whole training steps of a model instead of operators",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  tigon bench step --model config.json --batch 8 --seq 1024\n"
        "  tigon bench step --model config.json --peers native,tigon --steps 200 --output benchmarks/results --plot\n"
        "  tigon bench step --model config.json --batch 1 --seq 8192 --checkpointing --max-context\n\n"
        "variants:\n  " + ", ".join(VARIANTS),
    )
    parser.add_argument("--model", type=Path, metavar="FILE", help="configuration of a causal language model, JSON")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences a step (default: %(default)s)")
    parser.add_argument("--seq", type=int, default=1024, metavar="N", help="tokens a sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps (default: %(default)s)")
    parser.add_argument(
        "--warmup", type=int, default=3, metavar="N", help="steps before those, at least 3 (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="go through all variants so many times")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in backward")
    parser.add_argument(
        "--peers",
        default=",".join(DEFAULT),
        metavar="NAMES",
        help="variants, comma-separated (default: %(default)s); those not installed are left out",
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--attention",
        choices=ATTENTION,
        default="sdpa",
        help="torch's choice of fused attention, transformers' own in plain torch, or one of torch's (default: sdpa)",
    )
    parser.add_argument("--lr", type=float, default=5e-5, metavar="X", help="learning rate of AdamW (default: 5e-5)")
    parser.add_argument(
        "--ramp", type=int, default=20, metavar="N", help="steps in which that rate is reached (default: %(default)s)"
    )
    parser.add_argument("--clip", type=float, default=0.0, metavar="X", help="clip the norm of all gradients at X")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: 0)")
    parser.add_argument("--text-seed", type=int, default=0, metavar="N", help="of the order of the text (default: 0)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--no-profile", action="store_true", help="do not find out where the time goes")
    parser.add_argument(
        "--max-context", action="store_true", help="instead: find the longest sequence, beginning with --seq"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for JSONL rows, for example benchmarks/results")
    parser.add_argument(
        "--plot", action="store_true", help="also draw them, a PNG and an SVG a model; without --model all in --output"
    )
    parser.add_argument(
        "--readme", type=Path, metavar="FILE", help="measure nothing: rewrite the table in FILE from rows in --output"
    )


# ---- what is asked for ----


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Check the options.

    Raises:
        ValueError: an option cannot work; the message names it.
    """
    import torch

    if arguments.model is None:
        raise ValueError("bench: step: --model: expected a configuration file, got none")
    if not arguments.model.is_file():
        raise ValueError(f"bench: step: --model: no file {arguments.model}")
    for name, least in (("batch", 1), ("seq", 2), ("steps", 1), ("warmup", 3), ("rounds", 1), ("ramp", 1)):
        if getattr(arguments, name) < least:
            raise ValueError(f"bench: step: --{name}: expected at least {least}, got {getattr(arguments, name)}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("bench: step: needs transformers: pip install 'tigon[hf]'")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise ValueError("bench: step: TRITON_INTERPRET is set: a step through the interpreter measures nothing")
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench: step: --device cuda: torch sees no CUDA device")
    if arguments.max_context and device == "cpu":
        raise ValueError("bench: step: --max-context: needs a CUDA device, on a CPU memory has no such limit")
    return Plan(
        model=arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        steps=arguments.steps,
        warmup=arguments.warmup,
        checkpointing=arguments.checkpointing,
        dtype=arguments.dtype,
        attention=arguments.attention,
        lr=arguments.lr,
        ramp=arguments.ramp,
        clip=arguments.clip,
        seed=arguments.seed,
        text_seed=arguments.text_seed,
        device=device,
        command=_command(arguments),
        profile=not arguments.no_profile,
    )


def _command(arguments: argparse.Namespace) -> str:
    # What the allocator is told decides how much fits.
    told = [f"{name}={os.environ[name]}" for name in _ALLOCATOR if os.environ.get(name)]
    words = [
        *told,
        "tigon bench step",
        f"--model {arguments.model}",
        f"--batch {arguments.batch}",
        f"--seq {arguments.seq}",
    ]
    words += [f"--steps {arguments.steps}", f"--warmup {arguments.warmup}", f"--peers {arguments.peers}"]
    others = {
        "rounds": 1,
        "dtype": "bfloat16",
        "attention": "sdpa",
        "lr": 5e-5,
        "ramp": 20,
        "clip": 0.0,
        "seed": 0,
        "text_seed": 0,
    }
    words += [
        f"--{name.replace('_', '-')} {getattr(arguments, name)}"
        for name, usual in others.items()
        if getattr(arguments, name) != usual
    ]
    flags = ("checkpointing", "max_context")
    return " ".join(words + [f"--{name.replace('_', '-')}" for name in flags if getattr(arguments, name)])


def chosen_variants(names: str, device: str, say: Callable[[str], None]) -> list[Variant]:
    """Those named that can run here; what is left out is said.

    Raises:
        ValueError: a name is unknown, or none is left.
    """
    wanted = [name for name in names.split(",") if name]
    unknown = [name for name in wanted if name not in VARIANTS]
    if unknown:
        raise ValueError(f"bench: step: --peers: expected some of {', '.join(VARIANTS)}, got {', '.join(unknown)}")
    chosen = []
    for variant in (VARIANTS[name] for name in wanted):
        if not variant.is_available:
            say(f"{variant.name}: left out: {variant.requires} is not installed")
        elif variant.is_captured and device != "cuda":
            say(f"{variant.name}: left out: needs a CUDA device")
        else:
            chosen.append(variant)
    if not chosen:
        raise ValueError(f"bench: step: --peers: expected at least one that can run here, got {names!r}")
    return chosen


# ---- a process for each variant ----

# None of these uses a device when it is imported.
_PRELOADED = ["transformers.models.auto.modeling_auto", "transformers.modeling_utils", "tigon.bench.step_train"]


def _child(work: Callable[..., dict[str, Any]], plan: Plan, name: str, pipe: Any) -> None:
    import torch

    if plan.device == "cuda" and torch.cuda._is_in_bad_fork():
        pipe.send(("again", None))
        return
    try:
        pipe.send(("result", work(plan, VARIANTS[name], lambda text: pipe.send(("say", text)))))
    except Exception as error:
        if os.environ.get("TIGON_DEBUG", "0") not in ("", "0"):
            raise
        first = (str(error).strip() or "no message").splitlines()[0]
        pipe.send(("error", f"{type(error).__name__}: {first[:300]}"))


def in_process(
    work: Callable[..., dict[str, Any]], plan: Plan, name: str, say: Callable[[str], None], method: str = ""
) -> dict[str, Any]:
    """`work(plan, variant, say)` in a process that ends with it: nothing that a variant changed or holds stays.

    Where the system can fork, the process comes from a server that has imported everything and never used the device.

    Raises:
        RuntimeError: it failed; the message says how.
    """
    method = method or ("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        # Otherwise counting the devices uses them, and a process forked after that cannot.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        context.set_forkserver_preload(_PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, plan, name, theirs))
    process.start()
    theirs.close()
    try:
        while True:
            try:
                what, value = ours.recv()
            except EOFError:
                process.join()
                raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
            if what == "say":
                say(value)
            elif what == "again":
                break
            elif what == "error":
                raise RuntimeError(value)
            else:
                return value
    finally:
        process.join(timeout=20)
        if process.is_alive():
            process.kill()
            process.join()
    return in_process(work, plan, name, say, "spawn")


# ---- rows ----


def row_of(plan: Plan, variant: Variant, rounds: list[dict[str, Any]]) -> StepRow:
    """One row of what the rounds of a variant measured; times of all, the curve of the first, the worst memory."""
    first, last = rounds[0], rounds[-1]
    common = {name: first[name] for name in ("gpu", "torch", "triton", "transformers", "commit", "date", "command")}
    row = StepRow(
        **_case(plan),
        implementation=variant.name,
        version=variant.version,
        status=next((r["status"] for r in rounds if r["status"] != "ok"), "ok"),
        peak_gib=round(max(r["peak_gib"] for r in rounds), 3),
        reserved_gib=round(max(r["reserved_gib"] for r in rounds), 3),
        **common,
    )
    if row.status != "ok":
        return row
    timing = spread([ms for r in rounds for ms in r["samples_ms"]])
    return dataclasses.replace(
        row,
        tokens_per_s=round(plan.batch * plan.seq / timing.median_ms * 1e3, 1),
        step_ms=round(timing.median_ms, 3),
        low_ms=round(timing.low_ms, 3),
        high_ms=round(timing.high_ms, 3),
        first_peak_gib=round(max(r["first_peak_gib"] for r in rounds), 3),
        first_step_s=round(first["first_step_s"], 2),
        sm_mhz=last["sm_mhz"],
        replaced=first["replaced"],
        parameters=first["parameters"],
        losses=first["losses"],
        kinds_ms=last["kinds_ms"],
    )


def _case(plan: Plan) -> dict[str, Any]:
    return {
        "case": plan.case,
        "batch": plan.batch,
        "seq": plan.seq,
        "checkpointing": plan.checkpointing,
        "dtype": plan.dtype,
        "attention": plan.attention,
        "text_seed": plan.text_seed,
    }


class Run:
    """All variants of one call, with what failed."""

    def __init__(self, plan: Plan, variants: list[Variant], rounds: int, say: Callable[[str], None]) -> None:
        self.plan, self.variants, self.rounds, self.say = plan, variants, rounds, say
        self.failed: dict[str, str] = {}

    def _each(self, work: Callable[..., dict[str, Any]]) -> Iterator[tuple[Variant, dict[str, Any]]]:
        for turn in range(self.rounds):
            for variant in self.variants:
                if variant.name in self.failed:
                    continue
                label = variant.name + (f" {turn + 1}/{self.rounds}" if self.rounds > 1 else "")
                began = time.monotonic()
                try:
                    found = in_process(
                        work, self.plan, variant.name, lambda text, label=label: self.say(f"{label}: {text}")
                    )
                except RuntimeError as error:
                    self.failed[variant.name] = str(error)
                    self.say(f"{label}: failed: {error}")
                    continue
                self.say(f"{label}: {time.monotonic() - began:.0f} s in all")
                yield variant, found

    def measured(self) -> Iterator[list[StepRow]]:
        """All rows so far, after every variant."""
        found: dict[str, list[dict[str, Any]]] = {}
        for variant, result in self._each(measure):
            found.setdefault(variant.name, []).append(result)
            yield [row_of(self.plan, VARIANTS[name], results) for name, results in found.items()]

    def longest(self) -> Iterator[list[LongestRow]]:
        """The same for the longest sequences."""
        rows: list[LongestRow] = []
        case = {name: value for name, value in _case(self.plan).items() if name not in ("seq", "text_seed")}
        for variant, result in self._each(find_longest):
            rows.append(LongestRow(**case, implementation=variant.name, version=variant.version, **result))
            yield rows


def run(arguments: argparse.Namespace) -> int:
    """Carry out `tigon bench step`; the exit status, 1 where a variant failed."""
    if arguments.readme is not None:
        if arguments.output is None:
            raise ValueError("bench: step: --readme: expected --output with the folder of the rows, got none")
        step_rows.write_into(arguments.readme, arguments.output)
        print(f"wrote {arguments.readme}")
        return 0

    if arguments.plot and arguments.model is None:
        if arguments.output is None:
            raise ValueError("bench: step: --plot: expected --output with the folder of the rows, got none")
        for path in sorted(arguments.output.rglob(store.STEPS)):
            for drawn in step_rows.plots(store.read(path, StepRow), path.parent):
                print(f"wrote {drawn}")
        return 0

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    plan = plan_of(arguments)
    job = Run(plan, chosen_variants(arguments.peers, plan.device, say), arguments.rounds, say)
    rows: list[Any] = []
    written: list[Path] = []
    for rows in job.longest() if arguments.max_context else job.measured():
        # After every variant, so that an interruption loses none that is finished.
        if arguments.output is not None:
            written = [step_rows.write(rows, arguments.output)]
            if arguments.plot and not arguments.max_context:
                written += step_rows.plots(rows, written[0].parent)
    if rows:
        print("\n".join([step_rows.text_table(rows), *(f"wrote {path}" for path in written)]), flush=True)
    for name, reason in job.failed.items():
        say(f"{name}: failed: {reason}")
    return 1 if job.failed else 0
