"""The `tigon` command. Each subcommand is two functions: one declares its options, one runs it and imports late."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import __version__

Command = Callable[[argparse.Namespace], int]
DTYPES = ("float32", "bfloat16", "float16")


def _add(commands: Any, name: str, run: Command, help: str, description: str, examples: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


# ---- info ----


def _add_info(commands: Any) -> None:
    parser = _add(
        commands,
        "info",
        _info,
        "versions, devices, the backend of each operator with the reason, and choices by time",
        "Say what tigon finds on this machine, which backend each operator takes on each device, and which of several"
        " ways was found the fastest.",
        "  tigon info\n  tigon info --json",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def collect_info() -> dict[str, Any]:
    """What `tigon info` prints, as data."""
    import torch

    from . import current_backend, why_not
    from .ops import OPS, _choice_file
    from .ops._device import why_no_kernels
    from .ops._triton import INTERPRETED
    from .specs import Make, all_specs

    devices: list[dict[str, Any]] = [{"device": "cpu", "name": platform.processor() or platform.machine()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "bfloat16": not why_no_kernels(torch.device("cuda", index), torch.bfloat16),
            }
        )
    operators: dict[str, Any] = {}
    for name, spec in all_specs().items():
        if name not in OPS:
            continue
        case = spec.cases[0]
        for found in devices:
            dtype = torch.bfloat16 if found.get("bfloat16") else torch.float32
            inputs = spec.inputs(case, Make(case, found["device"], dtype))
            reasons = why_not(name, **inputs, **case.options)
            operators.setdefault(name, {})[found["device"]] = {
                "backend": "torch" if reasons else "triton",
                "why_not_triton": reasons,
            }
    return {
        "tigon": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton") or _version("triton-windows"),
        "transformers": _version("transformers"),
        "backend": current_backend(),
        "interpreter": INTERPRETED,
        "devices": devices,
        "operators": operators,
        "choices_file": None if _choice_file.path() is None else str(_choice_file.path()),
        "choices": {
            environment: {key: {"way": way, "ms": times} for key, (way, times) in choices.items()}
            for environment, choices in _choice_file.load_all().items()
        },
    }


def _info(args: argparse.Namespace) -> int:
    info = collect_info()
    if args.json:
        print(json.dumps(info, indent=1))
        return 0
    print(f"tigon {info['tigon']}, Python {info['python']}, {info['platform']}")
    toolkit = f"CUDA {info['cuda']}" if info["cuda"] else f"ROCm {info['hip']}" if info["hip"] else "no CUDA"
    print(f"  torch         {info['torch']} ({toolkit})")
    interpreter = " (interpreter: TRITON_INTERPRET is set)" if info["interpreter"] else ""
    print(f"  triton        {info['triton'] or 'not installed'}{interpreter}")
    print(f"  transformers  {info['transformers'] or 'not installed'}")
    print(f"  backend       {info['backend']}")
    print("devices")
    for found in info["devices"]:
        extra = f", capability {found['capability']}, {found['memory_gib']} GiB" if "capability" in found else ""
        print(f"  {found['device']:<8}{found['name']}{extra}")
    print("operators")
    for name, by_device in info["operators"].items():
        for device, verdict in by_device.items():
            reason = f"   {'; '.join(verdict['why_not_triton'])}" if verdict["why_not_triton"] else ""
            print(f"  {name:<36}{device:<8}{verdict['backend']:<7}{reason}".rstrip())
    print(f"choices   measured once for a size, kept in {info['choices_file'] or 'no file: TIGON_CACHE_DIR is empty'}")
    for environment, choices in info["choices"].items():
        print(f"  {environment}")
        for key, choice in choices.items():
            times = ", ".join(f"{way} {ms:.3f} ms" for way, ms in choice["ms"].items())
            print(f"    {key}: {choice['way']}   ({times})")
    if not info["choices"]:
        print("  none yet")
    return 0


# ---- check ----


def _add_check(commands: Any) -> None:
    parser = _add(
        commands,
        "check",
        _check,
        "compare every operator with its fp64 reference on this machine",
        "Run each operator forward, backward, strided, compiled and more, and hold its error against the budget that\n"
        "plain torch sets in the same dtype. A CPU runs the kernels in Triton's interpreter, in float32.\n"
        "Exit status 1 when anything fails.",
        "  tigon check\n"
        "  tigon check --op rms_norm --op cross_entropy\n"
        "  tigon check --device cuda --dtype bfloat16 --json check.json",
    )
    parser.add_argument("--op", action="append", metavar="NAME", help="operator to check; may be repeated")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="may be repeated; default: float32 and bfloat16 (float16 before Ampere) on a GPU, float32 on a CPU",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result to FILE")


def _check(args: argparse.Namespace) -> int:
    import dataclasses

    import torch

    from .ops import backend
    from .ops._device import MIN_BF16_CAPABILITY, why_no_kernels
    from .ops._triton import HAS_TRITON, INTERPRETED

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return _fail("check", "--device cuda: torch sees no CUDA device")
    if device == "cuda" and INTERPRETED:
        return _fail("check", "TRITON_INTERPRET is set: unset it to check the kernels that a GPU runs")
    if device == "cpu" and HAS_TRITON and not INTERPRETED:
        # The kernels were decorated for the compiler when tigon was imported; only a new process changes that.
        return subprocess.call(
            [sys.executable, "-m", "tigon.cli", *args.argv], env={**os.environ, "TRITON_INTERPRET": "1"}
        )

    from ._progress import Progress
    from .specs import all_specs
    from .testing import cases_for, check_op

    specs = all_specs()
    unknown = [name for name in args.op or () if name not in specs]
    if unknown:
        return _fail("check", f"--op: expected one of {', '.join(specs)}, got {', '.join(unknown)}")
    if args.dtype:
        dtypes = args.dtype
    elif device == "cuda" and torch.cuda.get_device_capability() >= MIN_BF16_CAPABILITY:
        dtypes = ["float32", "bfloat16"]
    else:
        dtypes = ["float32", "float16"] if device == "cuda" else ["float32"]
    if args.json and not args.json.parent.is_dir():
        return _fail("check", f"--json: no folder {args.json.parent}")
    # Kernels wherever they can run, whatever the environment says: a check of the references would pass for one.
    forced = "torch" if why_no_kernels(torch.device(device), torch.float32) else "triton"
    if device == "cpu" and INTERPRETED and "bfloat16" in dtypes:
        return _fail("check", "--dtype bfloat16: Triton's interpreter truncates bfloat16, use float32 on a CPU")

    results, seconds = [], {}
    plan = [(name, dtype) for name in args.op or specs for dtype in dtypes]
    total = sum(len(cases_for(specs[name], device, getattr(torch, dtype))) for name, dtype in plan)
    progress = Progress("check", max(total, 1))
    done = 0
    for name, dtype in plan:
        started, case = time.monotonic(), None
        with backend(forced):
            for result in check_op(specs[name], device=device, dtype=getattr(torch, dtype)):
                results.append(result)
                if result.case != case:
                    case = result.case
                    done += 1
                    progress.update(done, f"{name} {dtype}")
        seconds[name, dtype] = time.monotonic() - started

    print(f"{'operator':<36}{'dtype':<10}{'cases':>6}{'checks':>8}{'failed':>8}{'budget used':>13}{'seconds':>9}")
    for name, dtype in plan:
        mine = [r for r in results if (r.op, r.dtype) == (name, dtype)]
        failed = [r for r in mine if not r.passed]
        # A failed comparison has no share: its budget is infinite or was never reached.
        used = max((r.used for r in mine if r.passed), default=0.0)
        num_cases = len({r.case for r in mine})
        print(
            f"{name:<36}{dtype:<10}{num_cases:>6}{len(mine):>8}{len(failed):>8}{used:>13.0%}"
            f"{seconds[name, dtype]:>9.1f}"
        )
    failures = [r for r in results if not r.passed]
    for r in failures:
        print(f"FAILED {r.op} {r.dtype} case {r.case}, {r.stage}: {r.message or f'{r.used:.2f} of the budget'}")
    if args.json:
        record = {"info": collect_info(), "device": device, "results": [dataclasses.asdict(r) for r in results]}
        # JSON has no infinity; a failed comparison has no share of the budget.
        for row in record["results"]:
            row["used"] = row["used"] if row["passed"] else None
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(results) - len(failures)} passed, {len(failures)} failed on {device}, backend {forced}")
    return 1 if failures or not results else 0


# ---- demo ----


def _add_demo(commands: Any) -> None:
    parser = _add(
        commands,
        "demo",
        _demo,
        "train a small model twice, native and patched, and draw the comparison",
        "Train the same model on the same text from the same seed, native and patched by tigon, each in a process of\n"
        "its own. Writes demo.png and demo.json. On a CPU it ends within three minutes. Needs tigon[hf,bench].",
        "  tigon demo\n"
        "  tigon demo --device cuda --steps 200\n"
        "  tigon demo --text book.txt --seq-len 256\n"
        "  tigon demo --model config.json --batch-size 2",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8 text; default: Python's language reference")
    parser.add_argument(
        "--model",
        metavar="SOURCE",
        help="configuration file, hub id or local folder; random weights unless the folder holds some",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="optimiser steps of each run")
    parser.add_argument("--batch-size", type=int, metavar="N", help="sequences a step")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens a sequence")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="default: float32 on a CPU, bfloat16 on a GPU",
    )
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help="learning rate of AdamW (default: 1e-3)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), metavar="FOLDER", help="default: demo-output"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")


def _demo(args: argparse.Namespace) -> int:
    from .demo import DemoError, Options, run

    fields = ("text", "model", "steps", "batch_size", "seq_len", "device", "dtype", "lr", "output", "seed")
    try:
        run(Options(**{name: getattr(args, name) for name in fields}))
    except DemoError as error:
        return _fail("demo", str(error))
    return 0


# ---- patch-report ----


def _add_patch_report(commands: Any) -> None:
    parser = _add(
        commands,
        "patch-report",
        _patch_report,
        "what tigon.patch would replace in a model, from its configuration alone",
        "Build a model without memory for its weights, patch it, and print what was replaced, what was kept, and why.\n"
        "Exit status 1 when nothing is replaced. Needs tigon[hf].",
        "  tigon patch-report config.json\n"
        "  tigon patch-report ./my-model --html report.html\n"
        "  tigon patch-report ./my-model --json",
    )
    parser.add_argument(
        "model",
        metavar="SOURCE",
        help="configuration file, local folder or hub id, or a model type of transformers, with its default values",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page to FILE")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write JSON to FILE; without FILE print it, and no table"
    )


def _patch_report(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("transformers") is None:
        return _fail("patch-report", "needs transformers: pip install 'tigon[hf]'")
    import warnings

    from .patch import patch

    try:
        model = _empty_model(args.model)
    except ValueError as error:
        return _fail("patch-report", str(error).strip().splitlines()[0])
    with warnings.catch_warnings():
        # Nothing replaced is said by the exit status.
        warnings.simplefilter("ignore", UserWarning)
        report = patch(model)
    if args.html:
        args.html.write_text(report.to_html(), encoding="utf-8")
    if args.json and args.json != "-":
        Path(args.json).write_text(report.to_json(indent=1) + "\n", encoding="utf-8")
    print(report.to_json(indent=1) if args.json == "-" else report)
    return 0 if report.replaced else 1


def _empty_model(source: str) -> Any:
    """The model of a configuration, on the meta device; ValueError says why there is none."""
    import torch
    import transformers

    if source.endswith(".json") and not Path(source).is_file():
        raise ValueError(f"no file {source}")
    try:
        if source in transformers.CONFIG_MAPPING and not Path(source).exists():
            config = transformers.AutoConfig.for_model(source)
        else:
            config = transformers.AutoConfig.from_pretrained(source)
    except Exception as error:
        # Whatever a configuration class makes of wrong values.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"no configuration can be read from {source!r}: {reason}") from error
    autos = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModel,
    )
    named = (getattr(transformers, name, None) for name in config.architectures or ())
    classes = [cls for cls in named if isinstance(cls, type)]
    builders = [lambda cls=cls: cls(config) for cls in classes]
    builders += [lambda auto=auto: auto.from_config(config) for auto in autos if type(config) in auto._model_mapping]
    if not builders:
        raise ValueError(f"no model class for the configuration {type(config).__name__}")
    try:
        with torch.device("meta"):
            return builders[0]()
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"no model can be built from {source!r}: {type(error).__name__}: {reason}") from error


# ---- hub ----


def _add_hub(commands: Any) -> None:
    parser = _add(
        commands,
        "hub",
        _hub,
        "the operators and layers as a repository for Hugging Face's `kernels` package",
        "Write the operators, losses and layers into a folder that `kernels` loads, with a card, a benchmark and\n"
        "tests; or say where this version has such a folder already.",
        "  tigon hub export ./tigon-kernels\n  tigon hub path",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    exporting = actions.add_parser("export", help="write the repository into a folder")
    exporting.add_argument("directory", metavar="DIR", help="folder to make; empty, or an earlier export with --force")
    exporting.add_argument("--force", action="store_true", help="replace an earlier export")
    actions.add_parser("path", help="print the folder of this version, which is made where there is none")


def _hub(args: argparse.Namespace) -> int:
    from . import hub

    print(hub.repository() if args.action == "path" else hub.export(args.directory, force=args.force))
    return 0


# ---- bench ----


def _add_bench(commands: Any) -> None:
    from .bench.main import add_arguments

    parser = _add(
        commands,
        "bench",
        _bench,
        "time operators, or whole training steps, beside their peers on this GPU",
        "Measure forward and backward of each operator and of its peers, launch by launch in turn. An implementation\n"
        "of ours outside its error budget gets no number, another is marked. `tigon bench step` trains a whole model\n"
        "instead: tokens/s, memory, losses and where the time goes.",
        "  tigon bench --op rms_norm\n"
        "  tigon bench --op cross_entropy --peers torch_eager,torch_compile --output benchmarks/results --plot\n"
        "  tigon bench step --model config.json --batch 8 --seq 1024",
    )
    add_arguments(parser)


def _bench(args: argparse.Namespace) -> int:
    from .bench.main import run

    try:
        return run(args)
    except ValueError as error:
        return _fail("bench", str(error).removeprefix("bench: "))


# ---- memory ----


def _add_memory(commands: Any) -> None:
    from .bench.memory import add_arguments

    parser = _add(
        commands,
        "memory",
        _memory,
        "what a training step of a model holds, native and patched, without a GPU",
        "Run a training step with AdamW on tensors without memory, in each way to patch the model, and add up what is\n"
        "alive: what is saved for backward, the peak, and which way fits. Exit status 1 when none does.\n"
        "Needs tigon[hf].",
        "  tigon memory config.json --batch 2 --seq 8192 --gpu-memory 80\n"
        "  tigon memory config.json --seq 4096 --layers tigon_fused\n"
        "  tigon memory config.json --gpu-memory 141 --max-context",
    )
    add_arguments(parser)


def _memory(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("transformers") is None:
        return _fail("memory", "needs transformers: pip install 'tigon[hf]'")
    from .bench.memory import run

    try:
        return run(args)
    except ValueError as error:
        return _fail("memory", str(error).removeprefix("memory: "))


# ---- the command ----


def _fail(command: str, message: str) -> int:
    print(f"tigon {command}: {message}", file=sys.stderr)
    return 2


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tigon",
        description="Fused kernels for training language models: what runs here, whether it is right, what it saves.",
        epilog="`tigon COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action="version", version=f"tigon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for add in (_add_info, _add_check, _add_demo, _add_patch_report, _add_hub, _add_bench, _add_memory):
        add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    args.argv = argv
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("TIGON_DEBUG", "0") not in ("", "0"):
            raise
        return _fail(args.command, str(error))


if __name__ == "__main__":
    sys.exit(main())
