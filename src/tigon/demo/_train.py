"""One training run in its own process: `python -m tigon.demo._train PLAN.json`.

Takes a step for each line on standard input. Reports on standard output, a record a line, each behind `MARK`, so that
whatever else a library prints is no record.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ._options import MARK

# Compilation, allocator growth and cold caches end within these steps; no time is taken from them.
WARMUP_STEPS = 3


def build_model(plan: dict[str, Any]) -> Any:
    """The model of the plan, seeded, in training mode."""
    import transformers

    torch.manual_seed(plan["seed"])
    dtype, source = getattr(torch, plan["dtype"]), plan["model"]
    if source is None:
        config = transformers.LlamaConfig(**plan["config"])
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    elif plan["has_weights"]:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    else:
        config = transformers.AutoConfig.from_pretrained(source)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    return model.to(plan["device"]).train()


class PeakMemory:
    """Peak bytes since construction: allocated by torch on a GPU, resident in the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.baseline = torch.cuda.memory_allocated(device)
        else:
            self._reset()
            self.baseline = self._resident_peak()

    @staticmethod
    def _reset() -> None:
        # 5 sets the peak of the resident size to its present value (Linux, proc(5)).
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @staticmethod
    def _resident_peak() -> int:
        try:
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        except OSError:
            pass
        try:
            import resource
        except ImportError:
            # Windows has no getrusage; the run goes on without a memory figure.
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._resident_peak()


def _step_time(seconds: list[float]) -> float:
    """The 10 % quantile of the steps after the warm-up: those that no other program on the machine disturbed."""
    kept = seconds[WARMUP_STEPS:] or seconds[-1:]
    return statistics.quantiles(kept, n=10, method="inclusive")[0] if len(kept) > 1 else kept[0]


def emit(**record: Any) -> None:
    print(MARK + json.dumps(record), flush=True)


def train(plan: dict[str, Any]) -> None:
    device = torch.device(plan["device"])
    model = build_model(plan)
    report = None
    if plan["patched"]:
        from ..patch import patch

        report = patch(model)
    tokens = torch.load(plan["tokens"], weights_only=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan["lr"], weight_decay=0.0)
    # On the CPU, so that both runs and every device draw the same windows.
    windows = torch.Generator().manual_seed(plan["seed"])
    offsets = torch.arange(plan["seq_len"], device=device)
    losses, seconds = [], []
    memory = PeakMemory(device)
    emit(ready=True)
    for step in range(plan["steps"]):
        # A line for each step; none at all when the parent is gone.
        if not sys.stdin.readline():
            return
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = plan["lr"] * min(1.0, (step + 1) / (0.1 * plan["steps"] + 1))
        last = tokens.numel() - plan["seq_len"] + 1
        starts = torch.randint(last, (plan["batch_size"], 1), generator=windows)
        batch = tokens[starts.to(device) + offsets]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The one synchronisation of a step, which also closes its time.
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
        emit(step=step + 1, loss=losses[-1])
    peak = memory.read()
    tokens_per_step = plan["batch_size"] * plan["seq_len"]
    emit(
        result={
            "losses": losses,
            "step_seconds": seconds,
            "tokens_per_second": tokens_per_step / _step_time(seconds),
            "peak_bytes": peak,
            "baseline_bytes": memory.baseline,
            "num_parameters": sum(p.numel() for p in model.parameters()),
            "model_class": type(model).__name__,
            "patch_report": None if report is None else str(report),
            "patch_rows": None if report is None else report.to_dict()["rows"],
        }
    )


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: a demo through the interpreter measures nothing")
    train(json.loads(Path(sys.argv[1]).read_text()))
