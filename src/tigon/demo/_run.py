"""The demo from options to picture: text, plan, two processes, comparison."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from .._progress import Progress
from ._options import MARK, DemoError, Options
from ._text import encode, read_text, train_tokenizer

# The tokenizer of the demo ends near 9,000 entries on the default text, so 8,192 is always reached.
TOKENIZER_VOCAB = 8192
# Small enough for two cores and three minutes, with logits that outweigh the rest of the activations, as in
# models of a few billion parameters.
CPU_CONFIG = {
    "vocab_size": TOKENIZER_VOCAB,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
# Widths and vocabulary of a model of one billion parameters, a quarter of its depth.
GPU_CONFIG = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
CPU_DEFAULTS = {"steps": 50, "batch_size": 8, "seq_len": 512, "dtype": "float32"}
GPU_DEFAULTS = {"steps": 100, "batch_size": 4, "seq_len": 2048, "dtype": "bfloat16"}
# Below this much memory the native run at the sizes above does not fit.
LARGE_GPU_BYTES = 40 * 2**30
SMALL_GPU_BATCH, SMALL_GPU_SEQ_LEN = 2, 1024


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise DemoError("--device cuda: torch sees no CUDA device (`tigon info` says more)")
    return name


def device_name(device: str) -> str:
    """The name a person knows the device by."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"CPU, {os.cpu_count()} cores ({line.split(':', 1)[1].strip()})"
    except OSError:
        pass
    return f"CPU, {os.cpu_count()} cores ({platform.processor() or platform.machine()})"


def _sizes(options: Options, device: str) -> dict[str, Any]:
    sizes = dict(GPU_DEFAULTS if device == "cuda" else CPU_DEFAULTS)
    if device == "cuda" and torch.cuda.get_device_properties(0).total_memory < LARGE_GPU_BYTES:
        sizes.update(batch_size=SMALL_GPU_BATCH, seq_len=SMALL_GPU_SEQ_LEN)
    for name in sizes:
        value = getattr(options, name)
        if value not in (None, "auto"):
            sizes[name] = value
    return sizes


def _config_of(source: str) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoError(f"--model: no configuration can be read from {source!r}: {reason}") from error


def _has_weights(source: str) -> bool:
    folder = Path(source)
    return folder.is_dir() and any((*folder.glob("*.safetensors"), *folder.glob("*.bin")))


def make_plan(options: Options) -> tuple[dict[str, Any], torch.Tensor, str]:
    """The plan that both runs follow, the tokens, and a name for the text."""
    options.check()
    device = _device(options.device)
    sizes = _sizes(options, device)
    text, text_name = read_text(options.text)
    has_weights = options.model is not None and _has_weights(options.model)
    if options.model is None:
        config = GPU_CONFIG if device == "cuda" else CPU_CONFIG
        vocab_size, longest = config["vocab_size"], config["max_position_embeddings"]
    else:
        found = _config_of(options.model).get_text_config()
        config, vocab_size = None, getattr(found, "vocab_size", None)
        if vocab_size is None:
            raise DemoError(f"--model: expected a model with a vocabulary, got {type(found).__name__}")
        longest = getattr(found, "max_position_embeddings", None)
    if longest is not None and sizes["seq_len"] > longest:
        raise DemoError(f"--seq-len: the model takes at most {longest} positions, got {sizes['seq_len']}")
    if has_weights:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        tokenizer = train_tokenizer(text, min(vocab_size, TOKENIZER_VOCAB))
    tokens = encode(text, tokenizer, sizes["seq_len"])
    if int(tokens.max()) >= vocab_size:
        raise DemoError(
            f"--model: its vocabulary of {vocab_size} is too small for the tokenizer, which needs "
            f"{int(tokens.max()) + 1}"
        )
    plan = {
        **sizes,
        "model": options.model,
        "config": config,
        "has_weights": has_weights,
        "device": device,
        "lr": options.lr,
        "seed": options.seed,
        "vocab_size": vocab_size,
    }
    return plan, tokens, text_name


def _environment() -> dict[str, str]:
    env = dict(os.environ)
    # A CPU runs the references here; the interpreter is for tests and a thousand times slower.
    env.pop("TRITON_INTERPRET", None)
    env["TRANSFORMERS_VERBOSITY"] = "error"
    env["TOKENIZERS_PARALLELISM"] = "false"
    # Threads that spin at a barrier keep the core from the one they wait for wherever anything else runs; waiting
    # asleep made a step ten times faster on a busy machine, and no slower on an idle one.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The processes must find this very package, also when it is run from a source tree.
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (root, env.get("PYTHONPATH"))))
    return env


class _Training:
    """One run in a process of its own, a step at a time."""

    def __init__(self, label: str, plan: dict[str, Any], folder: Path) -> None:
        self.label = label
        self.errors = folder / f"{label}.stderr"
        plan_file = folder / f"{label}.json"
        plan_file.write_text(json.dumps(plan))
        with self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tigon.demo._train", str(plan_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=_environment(),
            )

    def next_record(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise self._failure()

    def step(self) -> float:
        """Take one step and return its loss."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None
        return self.next_record()["loss"]

    def _failure(self) -> DemoError:
        code = self.process.wait()
        said = self.errors.read_text().strip().splitlines()[-12:]
        hint = ""
        if code in (-9, 137) or any("out of memory" in line.lower() for line in said):
            hint = "\nIt ran out of memory: try a smaller --batch-size or --seq-len."
        return DemoError(f"the {self.label} run failed with exit code {code}.{hint}\n" + "\n".join(said))

    def close(self) -> None:
        """Wait for the end of a process that has given its result; end any other."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _train_all(plans: dict[str, dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    """Run the plans step by step in turn, the order reversed at every other step; results by label.

    In turn, because another program on the machine then slows all of them alike.
    """
    results: dict[str, dict[str, Any]] = {}
    num_steps = next(iter(plans.values()))["steps"]
    progress = Progress("+".join(plans), num_steps)
    with contextlib.ExitStack() as stack:
        runs = []
        for label, plan in plans.items():
            runs.append(_Training(label, plan, folder))
            stack.callback(runs[-1].close)
        try:
            for run in runs:
                run.next_record()
            for step in range(num_steps):
                losses = {run.label: run.step() for run in (runs if step % 2 == 0 else runs[::-1])}
                progress.update(step + 1, "  ".join(f"{run.label} {losses[run.label]:.3f}" for run in runs))
            for run in runs:
                results[run.label] = run.next_record()["result"]
        except BaseException:
            progress.abort()
            for run in runs:
                run.process.kill()
            raise
    return results


def compare(native: dict[str, Any], patched: dict[str, Any]) -> dict[str, float]:
    """The figures of the table, from the results of the two runs."""
    return {
        "largest_loss_difference": max(abs(a - b) for a, b in zip(native["losses"], patched["losses"], strict=True)),
        "speed_ratio": patched["tokens_per_second"] / native["tokens_per_second"],
        "saved_bytes": native["peak_bytes"] - patched["peak_bytes"],
    }


def table(results: dict[str, Any]) -> str:
    """The comparison as text."""
    native, patched, compared = results["native"], results["patched"], results["compared"]
    rows = [("", "native", "tigon", "")]
    rows.append(("first loss", f"{native['losses'][0]:.4f}", f"{patched['losses'][0]:.4f}", ""))
    difference = f"largest difference {compared['largest_loss_difference']:.1e}"
    rows.append(("last loss", f"{native['losses'][-1]:.4f}", f"{patched['losses'][-1]:.4f}", difference))
    speeds = (f"{run['tokens_per_second']:,.0f}" for run in (native, patched))
    rows.append(("tokens/s", *speeds, f"{compared['speed_ratio']:.2f}x"))
    peaks = (f"{run['peak_bytes'] / 2**20:,.0f}" for run in (native, patched))
    rows.append(("peak MiB", *peaks, f"{compared['saved_bytes'] / 2**20:,.0f} MiB saved"))
    return "\n".join(f"  {a:<12}{b:>12}{c:>12}   {d}".rstrip() for a, b, c, d in rows)


def run(options: Options) -> dict[str, Any]:
    """Run the demo, print the comparison, write `demo.png` and `demo.json` to `options.output`.

    Raises:
        DemoError: an option cannot work, a package is missing, or a run failed.
    """
    plan, tokens, text_name = make_plan(options)
    device = device_name(plan["device"])
    print(f"text    {text_name}: {tokens.numel():,} tokens")
    print(
        f"run     {plan['steps']} steps of {plan['batch_size']} x {plan['seq_len']} tokens, "
        f"vocabulary {plan['vocab_size']:,}, {plan['dtype']} on {device}"
    )
    sys.stdout.flush()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tigon-demo-") as temporary:
        folder = Path(temporary)
        torch.save(tokens, folder / "tokens.pt")
        plan["tokens"] = str(folder / "tokens.pt")
        plans = {"native": {**plan, "patched": False}, "tigon": {**plan, "patched": True}}
        if plan["device"] == "cpu":
            ended = _train_all(plans, folder)
        else:
            # One after the other, so that each may fill the GPU.
            ended = {label: _train_all({label: plans[label]}, folder)[label] for label in plans}
    results["native"], results["patched"] = ended["native"], ended["tigon"]
    results["compared"] = compare(results["native"], results["patched"])
    results["plan"] = {key: value for key, value in plan.items() if key != "tokens"}
    results["options"] = {key: str(value) for key, value in dataclasses.asdict(options).items()}
    results["environment"] = _versions(device)

    from ._figure import draw

    options.output.mkdir(parents=True, exist_ok=True)
    picture, numbers = options.output / "demo.png", options.output / "demo.json"
    numbers.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, picture)
    print("\n" + results["patched"]["patch_report"] + "\n\n" + table(results))
    if plan["device"] == "cpu":
        print("\nA CPU runs plain torch, not the kernels: the memory is saved here, the speed is for a GPU.")
    print(f"\nwrote {picture} and {numbers}")
    return results


def _versions(device: str) -> dict[str, str]:
    import transformers

    return {
        "tigon": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "date": datetime.date.today().isoformat(),
    }
