"""Timing on a CUDA device: interleaved launches, cold cache, medians with spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Longer than the host needs to enqueue any of the calls measured, so that the device never waits for it.
_SLEEP_CYCLES = 2_000_000


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one implementation over all rounds."""

    median_ms: float
    low_ms: float
    high_ms: float


def spread(samples: list[float]) -> Timing:
    ordered = sorted(samples)
    return Timing(statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10])


def device_times(
    prepare: Mapping[str, Callable[[], Callable[[], Any]]], *, rounds: int = 25, warmup: int = 3
) -> dict[str, Timing]:
    """Device time of each implementation, all measured in turn in every round.

    `prepare[name]()` does what is not measured (fresh inputs, the forward before a backward) and returns the call
    to measure. The cache is flushed and the host runs ahead, so the time is that of the kernels.
    """
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in prepare}
    for index in range(rounds + warmup):
        for name, ready in prepare.items():
            measured = ready()
            torch.cuda.synchronize()
            flush.zero_()
            torch.cuda._sleep(_SLEEP_CYCLES)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            kept = measured()
            end.record()
            end.synchronize()
            del kept
            if index >= warmup:
                samples[name].append(start.elapsed_time(end))
    return {name: spread(values) for name, values in samples.items()}


def graph_times(
    captured: Mapping[str, tuple[torch.cuda.CUDAGraph, int]], *, rounds: int = 25, warmup: int = 3
) -> dict[str, Timing]:
    """Device time of one of the calls that each graph holds, all graphs replayed in turn in every round."""
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in captured}
    for index in range(rounds + warmup):
        for name, (graph, num_calls) in captured.items():
            torch.cuda.synchronize()
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if index >= warmup:
                samples[name].append(start.elapsed_time(end) / num_calls)
    return {name: spread(values) for name, values in samples.items()}


def capture(
    ready: Callable[[], Callable[[], Any]], replicas: Callable[[], list[Callable[[], Any]]]
) -> tuple[torch.cuda.CUDAGraph, int, Any]:
    """One graph of the calls that `replicas()` returns, each on inputs of its own: none finds another's in the cache.

    `ready()()` runs before, so that nothing is compiled or allocated for the first time inside the graph. The last
    value must be kept as long as the graph: what the calls read and returned.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # A backward runs on the stream of its forward, which must be the one that is captured.
    with torch.cuda.stream(stream):
        for _ in range(2):
            ready()()
        calls = replicas()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = [call() for call in calls]
    torch.cuda.synchronize()
    return graph, len(calls), (calls, kept)


def host_times(
    prepare: Mapping[str, Callable[[], Callable[[], Any]]], *, rounds: int = 30, warmup: int = 5
) -> dict[str, Timing]:
    """Host milliseconds until a call returns, with the device kept busy so that nothing waits for results."""
    samples: dict[str, list[float]] = {name: [] for name in prepare}
    for index in range(rounds + warmup):
        for name, ready in prepare.items():
            measured = ready()
            torch.cuda.synchronize()
            torch.cuda._sleep(_SLEEP_CYCLES)
            start = time.perf_counter()
            kept = measured()
            elapsed = (time.perf_counter() - start) * 1e3
            torch.cuda.synchronize()
            del kept
            if index >= warmup:
                samples[name].append(elapsed)
    return {name: spread(values) for name, values in samples.items()}


def copy_gbps() -> float:
    """Bandwidth of a device-to-device copy of 2 GiB, bytes read plus bytes written, in GB/s: the memory roof."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    timing = device_times({"copy": lambda: lambda: target.copy_(source)})["copy"]
    return 2 * source.numel() / timing.median_ms * 1e-6


def peak_mib(ready: Callable[[], Callable[[], Any]]) -> float:
    """Largest device memory above what was allocated before the call, in MiB."""
    measured = ready()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = measured()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak / 2**20
