"""Examine many classes, each in a forked process, so that a crash, a hang or a leak of one stops no other."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from time import monotonic

from .compare import Record, examine

TIMEOUT_S = 60
MEMORY_BYTES = 8 << 30
_fork = multiprocessing.get_context("fork")


def _child(name: str, fuse: Sequence[str], sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sender.send(examine(name, fuse))


def _died(name: str, why: str) -> Record:
    return {"name": name, "native": "", "wrong": [why], "seconds": TIMEOUT_S}


def sweep(
    names: Sequence[str], workers: int = 2, timeout: float = TIMEOUT_S, fuse: Sequence[str] = ()
) -> Iterator[Record]:
    """Records in the order in which they are ready."""
    waiting = list(names)[::-1]
    running: dict[Connection, tuple[str, multiprocessing.Process, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name = waiting.pop()
            receiver, sender = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_child, args=(name, fuse, sender), daemon=True)
            process.start()
            sender.close()
            running[receiver] = (name, process, monotonic() + timeout)
        soonest = min(deadline for _, _, deadline in running.values())
        ready = wait(list(running), max(0.0, soonest - monotonic()))
        late = [receiver for receiver, (_, _, deadline) in running.items() if deadline <= monotonic()]
        for receiver in {*ready, *late}:
            name, process, _ = running.pop(receiver)  # type: ignore[index]
            record = _received(name, receiver, process, timeout)  # type: ignore[arg-type]
            receiver.close()
            yield record


def _received(name: str, receiver: Connection, process: multiprocessing.Process, timeout: float) -> Record:
    try:
        if receiver.poll():
            record = receiver.recv()
            process.join()
            return record
    except EOFError:
        process.join()
        return _died(name, f"the process ended with status {process.exitcode}")
    process.kill()
    process.join()
    return _died(name, f"the process was ended after {timeout:.0f} s")
