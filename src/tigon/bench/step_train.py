"""Trains one variant of one model and says what it took; in a process of its own, so that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import step_kinds
from .step_variants import Variant, num_changed
from .store import environment, version_of

PROFILED_STEPS = 2
# Of the steps before a capture; the rest of the warm-up is replayed.
_STEPS_BEFORE_CAPTURE = 2


@dataclass(frozen=True)
class Plan:
    """What all variants of a run have in common; `model` is a configuration file."""

    model: Path
    batch: int = 8
    seq: int = 1024
    steps: int = 8
    warmup: int = 3
    checkpointing: bool = False
    dtype: str = "bfloat16"
    attention: str = "sdpa"
    lr: float = 5e-5
    ramp: int = 20
    clip: float = 0.0
    seed: int = 0
    text_seed: int = 0
    device: str = "cuda"
    command: str = ""
    profile: bool = True

    @property
    def case(self) -> str:
        return self.model.stem


# ---- text ----


def words_as_tokens(text: str, vocab: int) -> Tensor:
    """Words, numbers and signs of a text as numbers below `vocab`, the most frequent the lowest.

    No tokenizer is at hand for every vocabulary; frequencies and repetitions are those of text, which is what an
    embedding's gradient and a loss that falls depend on.
    """
    words = re.findall(r"\w+|[^\w\s]|\n", text)
    # Words of equal frequency in their order in the text, so that every process has the same numbers.
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([numbers[word] % vocab for word in words])


def text_batches(plan: Plan, vocab: int, count: int) -> Tensor:
    """`count` batches of windows of Python's language reference, `[count, batch, seq]`, the same for every variant."""
    from pydoc_data.topics import topics

    tokens = words_as_tokens("\n\n".join(topics[key] for key in sorted(topics)), vocab)
    generator = torch.Generator().manual_seed(plan.text_seed)
    starts = torch.randint(tokens.numel(), (count, plan.batch, 1), generator=generator)
    return tokens[(starts + torch.arange(plan.seq)) % tokens.numel()]


# ---- model ----

# What torch's fused attention runs; "sdpa" leaves the choice to torch.
ATTENTION = ("sdpa", "eager", "flash", "cudnn", "efficient")


def attention_of(plan: Plan) -> Any:
    """The context in which a plan's attention is the one that it names."""
    if plan.attention in ("sdpa", "eager"):
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    named = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    return sdpa_kernel(getattr(SDPBackend, named[plan.attention]))


def build(plan: Plan) -> Any:
    """The model with random weights that depend on the seed alone, made on the device, in training mode."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(plan.model))
    config.use_cache = False
    torch.manual_seed(plan.seed)
    with torch.device(plan.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config,
            dtype=getattr(torch, plan.dtype),
            attn_implementation="eager" if plan.attention == "eager" else "sdpa",
        )
    model.train()
    if plan.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class Trainer:
    """A prepared model with its optimiser; `step` trains on one batch."""

    def __init__(self, plan: Plan, variant: Variant) -> None:
        self.plan, self.variant = plan, variant
        self.model = build(plan)
        classes = [type(module) for module in self.model.modules()]
        with warnings.catch_warnings():
            # Nothing replaced is in the row.
            warnings.simplefilter("ignore", UserWarning)
            variant.prepare(self.model)
        self.num_replaced = num_changed(self.model, classes)
        self.num_parameters = sum(p.numel() for p in self.model.parameters())
        self.vocab = self.model.config.get_text_config().vocab_size
        self.called = torch.compile(self.model) if variant.is_compiled else self.model
        # A graph reads its rate from memory.
        rate: Any = torch.zeros((), device=plan.device) if variant.is_captured else plan.lr
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=True, capturable=variant.is_captured)
        self.num_taken = 0
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None

    def step(self, batch: Tensor) -> Tensor:
        """One step on tokens `[batch, seq]`, which are their own labels; the loss before it, not waited for."""
        self.num_taken += 1
        rate = self.plan.lr * min(1.0, self.num_taken / self.plan.ramp)
        for group in self.optimiser.param_groups:
            group["lr"] = group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else rate
        if self.graph is not None:
            graph, tokens, loss = self.graph
            tokens.copy_(batch)
            graph.replay()
            return loss.clone()
        return self._computed(batch)

    def _computed(self, batch: Tensor) -> Tensor:
        loss = self.called(input_ids=batch, labels=batch).loss
        loss.backward()
        if self.plan.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def capture(self, batch: Tensor) -> None:
        """Record a step. Steps have run before, on the stream that this is called on."""
        tokens = batch.clone()
        graph = torch.cuda.CUDAGraph()
        free(self.plan)
        with masks_as_in_eager(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            loss = self._computed(tokens)
        self.graph = graph, tokens, loss


@contextlib.contextmanager
def masks_as_in_eager() -> Iterator[None]:
    """Have transformers find no packed sequences and need no mask, as a step outside a capture finds from the data.

    A capture cannot look at data, and transformers would then have attention read a mask that says what causal says.
    """
    from transformers import masking_utils

    names: dict[str, Callable[..., Any]] = {
        "find_packed_sequence_indices": lambda *args, **kwargs: None,
        "is_tracing": lambda *args, **kwargs: False,
    }
    before = {name: getattr(masking_utils, name) for name in names if hasattr(masking_utils, name)}
    try:
        for name in before:
            setattr(masking_utils, name, names[name])
        yield
    finally:
        for name, function in before.items():
            setattr(masking_utils, name, function)


# ---- measuring ----


def free(plan: Plan) -> None:
    gc.collect()
    if plan.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Also where not torch's allocator but a library or the driver has no memory left."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text


def _wait(plan: Plan) -> float:
    if plan.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peaks(plan: Plan) -> dict[str, float]:
    if plan.device != "cuda":
        return {"peak_gib": 0.0, "reserved_gib": 0.0}
    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


class _Clock:
    """The clock of the multiprocessors in MHz, read in a thread of its own while steps run; 0 where it cannot be."""

    def __init__(self, plan: Plan) -> None:
        self.samples: list[int] = []
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        if plan.device == "cuda":
            self.thread.start()

    def _read(self) -> None:
        # Of a machine without NVML or its Python package; the times stand without a clock.
        with contextlib.suppress(Exception):
            while not self.ended.wait(0.05):
                self.samples.append(torch.cuda.clock_rate())

    def stop(self) -> int:
        """The median."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(timeout=5)
        return sorted(self.samples)[len(self.samples) // 2] if self.samples else 0


def _profile(trainer: Trainer, batches: Tensor, step_ms: float) -> dict[str, float]:
    from torch.profiler import ProfilerActivity, profile

    plan = trainer.plan
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if plan.device == "cuda" else [])
    _wait(plan)
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        for batch in batches:
            trainer.step(batch)
        _wait(plan)
    launches = step_kinds.launches_in(profiler.events() or [], plan.device == "cuda")
    return step_kinds.by_kind(launches, step_kinds.Sizes(trainer.vocab, plan.seq), len(batches), step_ms)


def measure(plan: Plan, variant: Variant, say: Callable[[str], None]) -> dict[str, Any]:
    """Train `variant` and return the fields of its row that are its own; `samples_ms` are the measured steps.

    Running out of memory is an outcome: "status" says so, and nothing else was measured.
    """
    where = environment(plan.command) | {"transformers": version_of("transformers")}
    try:
        with attention_of(plan):
            return {"status": "ok", **_measured(plan, variant, say), **where}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "out of memory", "samples_ms": [], **_peaks(plan), **where}


def _measured(plan: Plan, variant: Variant, say: Callable[[str], None]) -> dict[str, Any]:
    is_cuda = plan.device == "cuda"
    began = _wait(plan)
    trainer = Trainer(plan, variant)
    say(
        f"{trainer.num_parameters / 1e9:.2f} billion parameters, {trainer.num_replaced} modules replaced, "
        f"{_wait(plan) - began:.1f} s"
    )
    count = plan.warmup + plan.steps + PROFILED_STEPS
    batches = text_batches(plan, trainer.vocab, count).to(plan.device)
    stream: Any = contextlib.nullcontext()
    if variant.is_captured:
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        # The steps before a capture belong on its stream: gradients are accumulated where they were made first.
        stream = torch.cuda.stream(own)
    with stream:
        started = _wait(plan)
        losses = [trainer.step(batches[0])]
        first_s = _wait(plan) - started
        say(f"first step {first_s:.1f} s")
        for index in range(1, plan.warmup):
            if variant.is_captured and index == _STEPS_BEFORE_CAPTURE:
                started = _wait(plan)
                trainer.capture(batches[index])
                first_s += _wait(plan) - started
            losses.append(trainer.step(batches[index]))
        _wait(plan)
        before = _peaks(plan)
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        clock = _Clock(plan)
        moments: list[Any] = [_mark(is_cuda)]
        for batch in batches[plan.warmup : plan.warmup + plan.steps]:
            losses.append(trainer.step(batch))
            moments.append(_mark(is_cuda))
        _wait(plan)
        sm_mhz = clock.stop()
        samples = [_between(a, b) for a, b in itertools.pairwise(moments)]
        peaks = _peaks(plan)
        if variant.is_captured:
            # A replay allocates nothing; what it needs is what the capture did.
            peaks["peak_gib"] = before["peak_gib"]
        values = [round(float(loss), 5) for loss in losses]
        kinds: dict[str, float] = {}
        if plan.profile:
            try:
                kinds = _profile(trainer, batches[-PROFILED_STEPS:], sorted(samples)[len(samples) // 2])
            except RuntimeError as error:
                # Of a machine that does not let itself be profiled; the times stand without it.
                say(f"no profile: {(str(error).splitlines() or [type(error).__name__])[0]}")
    return {
        "samples_ms": samples,
        "peak_gib": peaks["peak_gib"],
        "reserved_gib": peaks["reserved_gib"],
        "first_peak_gib": before["peak_gib"],
        "first_step_s": first_s,
        "losses": values,
        "replaced": trainer.num_replaced,
        "parameters": trainer.num_parameters,
        "kinds_ms": kinds,
        "sm_mhz": sm_mhz,
    }


def _mark(is_cuda: bool) -> Any:
    if not is_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


# ---- the longest sequence ----


def longest(
    fits: Callable[[int], float | None], first: int, limit: float, grain: int = 1024, most: int = 2**24
) -> tuple[int, dict[int, float]]:
    """The longest sequence that `fits`, to one `grain` or a sixty-fourth, and every length tried with its peak.

    `fits(length)` gives the peak of a step, None where memory ran out. Memory grows about linearly with the length, so
    two lengths that fit say where to look; what is returned has run.
    """
    tried: dict[int, float] = {}
    low, high, length = 0, most + grain, first
    while True:
        peak = fits(length)
        tried[length] = 0.0 if peak is None else peak
        low, high = (low, length) if peak is None else (length, high)
        if high - low <= max(grain, low // 64) or low >= most or high <= grain:
            return low, tried
        length = _next_length(sorted((n, p) for n, p in tried.items() if p), low, high, limit, grain, most)


def _next_length(fitted: list[tuple[int, float]], low: int, high: int, limit: float, grain: int, most: int) -> int:
    if high <= most:
        return max(low + 1, (low + high) // 2 // grain * grain or (low + high) // 2)
    guess = 2 * low
    if len(fitted) > 1 and fitted[-1][1] > fitted[-2][1]:
        (a, peak_a), (b, peak_b) = fitted[-2:]
        # Never far beyond what is known.
        guess = min(8 * b, int(b + (limit - peak_b) * (b - a) / (peak_b - peak_a)))
    return min(most, max(guess // grain * grain, low + max(grain, low // 64)))


def find_longest(plan: Plan, variant: Variant, say: Callable[[str], None]) -> dict[str, Any]:
    """The longest sequence of which a whole step fits into the device's memory, from `plan.seq` on."""
    where = environment(plan.command) | {"transformers": version_of("transformers")}
    try:
        trainer = Trainer(plan, variant)
        # The optimiser's state exists from here on.
        trainer.step(text_batches(Plan(plan.model, plan.batch, 16), trainer.vocab, 1)[0].to(plan.device))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"longest": 0, "peaks_gib": {}, **where}

    def fits(length: int) -> float | None:
        free(plan)
        if plan.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        began = _wait(plan)
        batch = text_batches(Plan(plan.model, plan.batch, length), trainer.vocab, 1)[0].to(plan.device)
        try:
            with attention_of(plan):
                trainer.step(batch)
            seconds = _wait(plan) - began
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            trainer.optimiser.zero_grad(set_to_none=True)
            say(f"{length} tokens: out of memory")
            return None
        peak = _peaks(plan)["peak_gib"]
        say(f"{length} tokens: {peak:.1f} GiB, {seconds:.1f} s")
        return peak

    limit = torch.cuda.get_device_properties(0).total_memory / 2**30 if plan.device == "cuda" else 1.0
    length, peaks = longest(fits, plan.seq, 0.98 * limit)
    return {"longest": length, "peaks_gib": {str(n): round(p, 2) for n, p in sorted(peaks.items())}, **where}
