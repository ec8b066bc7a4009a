"""What the generic checks cannot say of `vocab_parallel_linear_cross_entropy`: two processes share the classes.

The two are started once and run the functions of this file that begin with `run_`; what they return is compared here
with `linear_cross_entropy` on the whole weight and with its reference in fp64.
"""

from __future__ import annotations

import datetime
import importlib
import io
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tigon
from tigon.ops import linear_cross_entropy_reference, vocab_parallel_linear_cross_entropy_reference
from tigon.testing import assert_within_budget, poison

# `tigon.ops.vocab_parallel_linear_cross_entropy` as an attribute is the function.
module = importlib.import_module("tigon.ops.vocab_parallel_linear_cross_entropy")
operator = tigon.vocab_parallel_linear_cross_entropy

NAN, INF = float("nan"), float("inf")
SECONDS = 120
NAMES = ("loss", "dhidden", "dweight", "dbias")
# Uneven, with an odd size on each rank.
SIZES = (17, 12)
# The interpreter truncates to 16 bits where hardware rounds.
HALF = "torch" if os.environ["TIGON_TEST_DEVICE"] == "cpu" else "auto"


# Two processes.


def _device(rank: int) -> torch.device:
    if os.environ["TIGON_TEST_DEVICE"] != "cuda":
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def serve(rank: int, folder: str, requests: Any) -> None:
    """Run what the test asks for until it asks for nothing."""
    torch.set_num_threads(1)
    device = _device(rank)
    has_nccl = device.type == "cuda" and torch.cuda.device_count() > 1
    if has_nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_nccl else "gloo",
        init_method=f"file://{folder}/group",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=SECONDS // 2),
    )
    while (request := requests.recv()) is not None:
        name, kwargs = request
        torch.manual_seed(0)
        try:
            result = globals()[name](**kwargs)
            out = io.BytesIO()
            torch.save(result, out)
            requests.send((True, out.getvalue()))
        except BaseException:
            requests.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Pair:
    """Two processes that run the same function."""

    def __init__(self, folder: Path) -> None:
        context = mp.get_context("spawn")
        ends = [context.Pipe() for _ in range(2)]
        self.pipes = [end[0] for end in ends]
        self.processes = [
            context.Process(target=serve, args=(rank, str(folder), ends[rank][1]), daemon=True) for rank in range(2)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """What `function` returns in each."""
        for pipe in self.pipes:
            pipe.send((function.__name__, kwargs))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(SECONDS), f"rank {rank} does not answer"
            answers.append(pipe.recv())
        for rank, (is_done, answer) in enumerate(answers):
            assert is_done, f"rank {rank}: {answer}"
        return [torch.load(io.BytesIO(answer), weights_only=True, map_location="cpu") for _, answer in answers]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


# What they run.


def _inputs(
    sizes: tuple[int, int] = SIZES,
    rows: int = 11,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
    stored: float = 0.5,
    has_bias: bool = True,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, weight and bias of all ranks and labels, of which the third is ignored; the same everywhere."""
    drawn, classes = torch.Generator().manual_seed(7), sum(sizes)
    hidden, weight, bias = (
        torch.randn(*shape, generator=drawn) for shape in ((rows, width), (classes, width), (classes,))
    )
    labels = torch.randint(0, classes, (rows,), generator=drawn)
    if rows > 2:
        labels[2] = ignore_index
        hidden[2] = stored
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None, labels


def _upstream(of: Tensor) -> Tensor:
    return torch.linspace(-1.5, 2.0, of.numel(), dtype=of.dtype, device=of.device).reshape(of.shape)


def _run(
    function: Callable[..., Tensor],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    upstream: float | None = None,
    **options: Any,
) -> list[Tensor]:
    """The loss, then the gradients of hidden, weight and bias, for a given upstream gradient or one for each row."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    loss = function(leaves[0], leaves[1], labels, bias=leaves[2], **options)
    loss.backward(_upstream(loss) if upstream is None else torch.full_like(loss, upstream))
    return [loss.detach(), *(t.grad for t in leaves if t is not None)]


def _own(t: Tensor | None, sizes: tuple[int, int], rank: int | None = None) -> Tensor | None:
    """The rows of `t` that are of this rank."""
    rank = dist.get_rank() if rank is None else rank
    return None if t is None else t.split(list(sizes))[rank].to(_device(rank)).clone()


def _here(t: Tensor) -> Tensor:
    return t.to(_device(dist.get_rank()))


def run_step(
    sizes: tuple[int, int] = SIZES,
    backend: str = "auto",
    upstream: float | None = None,
    inputs: dict[str, Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    hidden, weight, bias, labels = _inputs(sizes, **(inputs or {}))
    if backend == "auto":
        assert not tigon.why_not(operator, hidden.to(_device(0)), weight, labels)
    with tigon.backend(backend), poison():
        return _run(operator, _here(hidden), _own(weight, sizes), _own(bias, sizes), _here(labels), upstream, **options)


# Comparison.


def _assert_same(results: list[list[Tensor]]) -> list[Tensor]:
    """What is of all ranks, after a look that both have the same loss and the same dhidden, to the bit."""
    first, second = results
    for name, a, b in zip(NAMES[:2], first, second, strict=False):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)), name
    return [*first[:2], *(torch.cat(both) for both in zip(first[2:], second[2:], strict=True))]


def _assert_within_budget(
    results: list[list[Tensor]],
    sizes: tuple[int, int] = SIZES,
    upstream: float | None = None,
    inputs: dict[str, Any] | None = None,
    factor: float = 2.0,
    **options: Any,
) -> None:
    """Two ranks together against `linear_cross_entropy` of the whole weight, and fp64."""
    actual = _assert_same(results)
    plain = {k: v for k, v in options.items() if k != "max_logits_bytes"}
    given = _inputs(sizes, **(inputs or {}))
    wide = [t.double() if t is not None and t.is_floating_point() else t for t in given]
    high = _run(linear_cross_entropy_reference, *wide, upstream, **plain)
    # Its own error is one draw, which may be next to zero; that of the whole operator is another.
    lows = [_run(linear_cross_entropy_reference, *given, upstream, **plain)]
    with tigon.backend("torch"):
        lows.append(_run(tigon.linear_cross_entropy, *given, upstream, **plain))
    for name, a, *low, c in zip(NAMES, actual, *lows, high, strict=False):
        error = [(t.double() - c).square().sum() for t in low]
        assert_within_budget(name, a, low[int(error[1] > error[0])], c, factor=factor)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 0.1},
    "softcap": {"softcap": 1.0},
    "logit_scale": {"logit_scale": 0.5},
    "ignored class of the first rank": {"ignore_index": 0, "inputs": {"ignore_index": 0}},
    "ignored class of the second rank": {"ignore_index": 20, "inputs": {"ignore_index": 20}},
    "ignored like a mark of the kernels": {"ignore_index": -2, "inputs": {"ignore_index": -2}},
    "no bias": {"inputs": {"has_bias": False}},
    "chunks": {"max_logits_bytes": 3 * 17 * 4},
    "all": {
        "label_smoothing": 0.2,
        "z_loss": 0.3,
        "softcap": 2.0,
        "logit_scale": 0.7,
        "max_logits_bytes": 2 * 17 * 4,
    },
}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_two_ranks_compute_what_one_does(pair: Pair, options: dict[str, Any], reduction: str, backend: str) -> None:
    options = options | {"reduction": reduction, "upstream": None if reduction == "none" else -0.7}
    _assert_within_budget(pair(run_step, backend=backend, **options), **options)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("count", [100, 0])
def test_number_of_items(pair: Pair, count: int, as_tensor: bool) -> None:
    results = pair(run_step, upstream=1.0, num_items=torch.tensor([count]) if as_tensor else count)
    _assert_within_budget(results, upstream=1.0, num_items=count)
    assert all((t == 0).all() == (count == 0) for t in results[0])


@pytest.mark.parametrize("sizes", [(1, 1), (17, 16), (130, 129), (1, 300), (0, 5), (5, 0), (4200, 130)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sizes_of_shards(pair: Pair, sizes: tuple[int, int], reduction: str) -> None:
    options = {"sizes": sizes, "reduction": reduction, "label_smoothing": 0.1, "upstream": 1.0, "inputs": {"rows": 5}}
    _assert_within_budget(pair(run_step, **options), **options)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows(pair: Pair, rows: int) -> None:
    options = {"upstream": 1.0, "inputs": {"rows": rows}}
    _assert_within_budget(pair(run_step, **options), **options)


@pytest.mark.parametrize("limit", [None, 304 * 32 * 2])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_16_bit(pair: Pair, reduction: str, limit: int | None) -> None:
    """The sums over ranks and over chunks are in fp32: the error is that of one rank and one chunk."""
    for dtype in (torch.bfloat16, torch.float16):
        options: dict[str, Any] = {
            "reduction": reduction,
            "upstream": 1.0,
            "label_smoothing": 0.1,
            "max_logits_bytes": limit,
            "sizes": (300, 212),
            "inputs": {"dtype": dtype, "rows": 2048, "width": 8},
        }
        if dtype == torch.float16 and reduction == "mean":
            # Before the loss scale such gradients are below the range of fp16.
            options |= {"upstream": 65536.0, "num_items": 2**20}
        results = pair(run_step, backend=HALF, **options)
        assert [t.dtype for t in results[0]] == [torch.float32, dtype, dtype, dtype]
        _assert_within_budget(results, **options)


def test_fp64(pair: Pair) -> None:
    options = OPTIONS["all"] | {"max_logits_bytes": 2 * 17 * 8, "inputs": {"dtype": torch.float64}}
    for reduction in ("mean", "none"):
        actual = _assert_same(pair(run_step, backend="torch", reduction=reduction, **options))
        plain = {k: v for k, v in options.items() if k not in ("inputs", "max_logits_bytes")}
        expected = _run(linear_cross_entropy_reference, *_inputs(**options["inputs"]), reduction=reduction, **plain)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def run_reference(**options: Any) -> list[Tensor]:
    hidden, weight, bias, labels = _inputs(dtype=torch.float64)
    given = _here(hidden), _own(weight, SIZES), _own(bias, SIZES), _here(labels)
    return _run(vocab_parallel_linear_cross_entropy_reference, *given, **options)


def test_reference_is_that_of_the_whole_weight(pair: Pair) -> None:
    options = {"label_smoothing": 0.2, "z_loss": 0.3, "softcap": 2.0, "logit_scale": 0.7, "reduction": "none"}
    actual = _assert_same(pair(run_reference, **options))
    expected = _run(linear_cross_entropy_reference, *_inputs(dtype=torch.float64), **options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


# Rows that do not count, and numbers that are none.


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("stored", [NAN, INF])
def test_what_an_ignored_row_holds_does_not_matter(pair: Pair, stored: float, reduction: str, backend: str) -> None:
    options = {"reduction": reduction, "backend": backend, "label_smoothing": 0.1, "z_loss": 0.1}
    expected = pair(run_step, **options)
    actual = pair(run_step, inputs={"stored": stored}, **options)
    for one, other in zip(actual, expected, strict=True):
        for name, a, b in zip(NAMES, one, other, strict=True):
            assert torch.equal(a, b), name
        assert (one[1][2] == 0).all()


def run_all_ignored(**options: Any) -> list[Tensor]:
    hidden, weight, bias, labels = _inputs()
    given = _here(hidden * NAN), _own(weight, SIZES), _own(bias, SIZES), _here(torch.full_like(labels, -100))
    return _run(operator, *given, **options)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_ignored_is_zero(pair: Pair, reduction: str, backend: str) -> None:
    for result in pair(run_all_ignored, reduction=reduction, label_smoothing=0.1, z_loss=0.1):
        assert all((t == 0).all() for t in result)


def run_bias(backend: str, values: tuple[float, float], **options: Any) -> list[Tensor]:
    """The bias of each rank is one number on all of its classes."""
    hidden, weight, _, labels = _inputs()
    bias = torch.cat([torch.full((size,), value) for size, value in zip(SIZES, values, strict=True)])
    given = _here(hidden), _own(weight, SIZES), _own(bias, SIZES), _here(labels)
    with tigon.backend(backend):
        return _run(operator, *given, **options)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("values", [(0.0, -INF), (-INF, 0.0), (-3e4, 3e4), (3e5, 3e5)], ids=str)
def test_shards_far_from_each_other(pair: Pair, values: tuple[float, float], smoothing: float, backend: str) -> None:
    """A shard that is masked out altogether, one that is far below, and an offset that all have."""
    hidden, weight, _, labels = _inputs()
    bias = torch.cat([torch.full((size,), value) for size, value in zip(SIZES, values, strict=True)])
    options = {"label_smoothing": smoothing, "reduction": "none", "upstream": 1.0}
    actual = _assert_same(pair(run_bias, backend=backend, values=values, **options))
    with tigon.backend(backend):
        expected = _run(tigon.linear_cross_entropy, hidden, weight, bias, labels, **options)
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        # Both have the same logits, which an offset of 3e5 rounds to a thirtieth.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


def run_bad_label(label: int, is_read: bool, **options: Any) -> list[Tensor] | str:
    hidden, weight, bias, labels = _inputs()
    labels[4] = label
    given = _here(hidden), _own(weight, SIZES), _own(bias, SIZES), _here(labels)
    if is_read:
        try:
            return _run(operator, *given, **options)
        except ValueError as error:
            return str(error)
    # What a GPU does, where nobody looks at the labels.
    with mock.patch.object(module, "checked_labels", lambda name, labels, *_: labels.long()):
        return _run(operator, *given, **options)


@pytest.mark.parametrize("label", [29, 1000, -1, -2])
def test_label_of_no_rank(pair: Pair, label: int) -> None:
    if os.environ["TIGON_TEST_DEVICE"] == "cpu":
        message = f"labels: expected a class below 29 or ignore_index -100, got {label} in row 4"
        assert all(message in answer for answer in pair(run_bad_label, label=label, is_read=True))
    loss, dhidden, dweight, _ = _assert_same(pair(run_bad_label, label=label, is_read=False, reduction="none"))
    assert loss.isnan().nonzero().flatten().tolist() == [4]
    assert dhidden.isnan().any(-1).nonzero().flatten().tolist() == [4]
    assert dweight.isnan().all()
    assert all(t.isnan().all() for t in _assert_same(pair(run_bad_label, label=label, is_read=False))[:1])


@pytest.mark.parametrize("offset", [0.0, 3e5])
def test_statistics_of_a_shard(device: torch.device, offset: float) -> None:
    """Of the kernel and of plain torch: a label elsewhere, an ignored one, a masked logit of the label, padding."""
    logits, labels = torch.randn(5, 130, device=device) + offset, torch.tensor([3, -2, -1, 129, -2], device=device)
    logits[2], logits[3, 129], logits[4] = NAN, -INF, -INF
    found = []
    with poison():
        for has_kernel in (True, False):
            out = [torch.empty(shape, device=device) for shape in ((5,), (5,), (5, 2))]
            module.shard_statistics(logits, labels, *out, module.Options(0.0, 0.1, None, 0.5), 200, has_kernel)
            found.append(out)
    for kernel, plain in zip(*found, strict=True):
        rows = [0, 1, 3, 4] if plain.dim() == 2 else slice(None)
        torch.testing.assert_close(kernel[rows], plain[rows])
    at, distance, stats = found[0]
    assert at[2] == distance[2] == stats[2].sum() == 0
    assert stats[4].tolist() == [-INF, 0.0]


# Where the shards are.


def run_starts(starts: list[int | None], sizes: tuple[int, int] = SIZES) -> list[Tensor] | str:
    """Shards in the order of their first classes, which are not in the order of ranks."""
    hidden, weight, bias, labels = _inputs()
    rank = dist.get_rank()
    start = starts[rank]
    part = slice(start or 0, (start or 0) + sizes[rank])
    given = _here(hidden), _here(weight[part]).clone(), _here(bias[part]).clone(), _here(labels)
    try:
        return _run(operator, *given, 1.0, vocab_start=start)
    except ValueError as error:
        return str(error)


def test_shards_in_another_order(pair: Pair) -> None:
    results = pair(run_starts, starts=[12, 0])
    loss, dhidden, *rest = _run(tigon.linear_cross_entropy, *_inputs(), 1.0)
    for result, part in zip(results, (slice(12, None), slice(12)), strict=True):
        for a, b in zip(result, (loss, dhidden, *(t[part] for t in rest)), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("starts", [[0, 16], [0, 18], [1, 18], [None, 17], [0, None]], ids=str)
def test_gaps_and_overlaps_are_refused_on_all_ranks(pair: Pair, starts: list[int | None]) -> None:
    for answer in pair(run_starts, starts=starts):
        assert answer.startswith("vocab_parallel_linear_cross_entropy: vocab_start: expected a shard that begins at")


def run_heads(all_sizes: list[tuple[int, int]]) -> list[Tensor]:
    return [run_step(sizes=sizes, upstream=1.0)[0] for sizes in all_sizes]


def test_heads_that_only_one_rank_can_tell_apart(pair: Pair) -> None:
    """A rank that has seen its size with one weight must still ask when the next has another size elsewhere."""
    heads = [(17, 12), (17, 13), (16, 13), (17, 12)]
    for result in pair(run_heads, all_sizes=heads):
        for sizes, loss in zip(heads, result, strict=True):
            torch.testing.assert_close(loss, tigon.linear_cross_entropy(*_by_name(sizes)[0], **_by_name(sizes)[1]))


def test_starts_of_four_ranks() -> None:
    assert [module._divided([(3, -1), (0, -1), (5, -1), (2, -1)], rank).start for rank in range(4)] == [0, 3, 3, 8]
    assert module._divided([(3, 7), (5, 2), (0, 9), (2, 0)], 1) == (2, 10, 5)


def _by_name(sizes: tuple[int, int]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    hidden, weight, bias, labels = _inputs(sizes)
    return (hidden, weight, labels), {"bias": bias}


def run_groups() -> list[Tensor]:
    """Of both ranks, by name; of each rank alone; None."""
    both, alone = dist.new_group([0, 1]), [dist.new_group([rank]) for rank in range(2)]
    rank, (hidden, weight, bias, labels) = dist.get_rank(), _inputs()
    given = _here(hidden), _own(weight, SIZES), _own(bias, SIZES), _here(labels)
    results = [_run(operator, *given, group=group)[0] for group in (both, None)]
    # Every label a class of the rank itself.
    labels = torch.where(labels == -100, labels, labels % SIZES[rank])
    ours = _run(operator, *given[:3], _here(labels), group=alone[rank])
    plain = _run(tigon.linear_cross_entropy, *given[:3], _here(labels))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    for group, expected in ((both, results[0]), (alone[rank], plain[0])):
        if group is both:
            labels = _inputs()[3]
        else:
            labels = torch.where(labels == -100, labels, labels % SIZES[rank])
        torch.testing.assert_close(compiled(*given[:2], _here(labels), bias=given[2], group=group), expected)
    with pytest.raises(ValueError, match="group: expected a process group with this rank in it"):
        operator(given[0], given[1], given[3], group=alone[1 - rank])
    return results


def test_groups(pair: Pair) -> None:
    for both, default in pair(run_groups):
        assert torch.equal(both, default)


# What is sent.


class _Sent:
    """Collectives and the number of elements in each."""

    def __enter__(self) -> list[Any]:
        made: list[Any] = []
        reduce, gather = dist.all_reduce, dist.all_gather

        def all_reduce(t: Tensor, operation: Any, **options: Any) -> Any:
            made.append(("max" if operation == dist.ReduceOp.MAX else "sum", t.numel(), t.dtype))
            return reduce(t, operation, **options)

        def all_gather(out: list[Tensor], t: Tensor, **options: Any) -> Any:
            made.append(("gather", t.numel(), t.dtype))
            return gather(out, t, **options)

        self.patches = (
            mock.patch.object(dist, "all_reduce", all_reduce),
            mock.patch.object(dist, "all_gather", all_gather),
        )
        for patch in self.patches:
            patch.start()
        return made

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


def run_communication(rows: int, **options: Any) -> dict[str, Any]:
    hidden, weight, bias, labels = _inputs(rows=rows, dtype=torch.bfloat16)
    hidden, labels = _here(hidden), _here(labels)
    weight, bias = _own(weight, SIZES), _own(bias, SIZES)
    sent: dict[str, Any] = {}
    with tigon.backend(HALF):
        for name, leaves in (
            ("first", (hidden, weight)),
            ("both", (hidden, weight)),
            ("weight", (weight,)),
            ("inference", (hidden, weight)),
        ):
            for t in leaves:
                t.requires_grad_()
            # A view of the same memory, as of a DTensor: nothing new to ask for.
            with _Sent() as forward, torch.inference_mode(name == "inference"):
                loss = operator(hidden, weight.view_as(weight), labels, bias=bias, **options)
            with _Sent() as backward:
                if name != "inference":
                    loss.sum().backward()
            sent[name] = forward, backward
            for t in leaves:
                t.requires_grad_(False)
    return sent


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nothing_of_the_size_of_the_vocabulary_is_sent(pair: Pair, smoothing: float) -> None:
    wide, sums = torch.float32, 3 if smoothing else 2
    options = {"rows": 10, "max_logits_bytes": 4 * 17 * 2, "label_smoothing": smoothing}
    chunks = [each for rows in (4, 4, 2) for each in (("max", rows, wide), ("sum", sums * rows, wide))]
    if os.environ["TIGON_TEST_DEVICE"] == "cuda":
        # Rows of logits are padded there, so that fewer fit.
        chunks = [each for rows in (2,) * 5 for each in (("max", rows, wide), ("sum", sums * rows, wide))]
    last = [("sum", 10 * 8, wide)]
    for sent in pair(run_communication, **options):
        assert sent["first"] == ([("gather", 2, torch.int64), *chunks, *last], [])
        assert sent["both"] == (chunks + last, [])
        assert sent["weight"] == sent["inference"] == (chunks, [])
    for sent in pair(run_communication, reduction="none", **options):
        assert sent["both"] == (chunks, last)
        assert sent["weight"] == sent["inference"] == (chunks, [])


# Gradients.


def run_training(is_whole: bool) -> list[Tensor]:
    """Three steps of a layer that every rank has, below a head that each has a part of."""
    hidden, weight, bias, labels = _inputs()
    layer = torch.nn.Linear(8, 8).to(_device(dist.get_rank()))
    hidden, labels = _here(hidden), _here(labels)
    head = [_here(t).clone() if is_whole else _own(t, SIZES) for t in (weight, bias)]
    parameters = [*layer.parameters(), *(t.requires_grad_() for t in head)]
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.05), []
    for _ in range(3):
        function = tigon.linear_cross_entropy if is_whole else operator
        loss = function(layer(hidden), head[0], labels, bias=head[1])
        (3 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    rows = [_own(t.cpu(), SIZES) if is_whole else t for t in head]
    return [torch.stack(losses), *(t.detach() for t in (*layer.parameters(), *rows))]


def test_a_step_is_that_of_the_whole_head(pair: Pair) -> None:
    parts, wholes = pair(run_training, is_whole=False), pair(run_training, is_whole=True)
    assert wholes[0][0][0] - wholes[0][0][-1] > 0.1
    for part, whole in zip(parts, wholes, strict=True):
        for a, b in zip(part, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    # Every rank has the same layer, to the bit.
    assert all(torch.equal(a, b) for a, b in zip(parts[0][1:3], parts[1][1:3], strict=True))


def run_again(reduction: str) -> list[Tensor]:
    hidden, weight, bias, labels = _inputs()
    leaves = [t.requires_grad_() for t in (_here(hidden), _own(weight, SIZES), _own(bias, SIZES))]
    loss = operator(leaves[0], leaves[1], _here(labels), bias=leaves[2], reduction=reduction, z_loss=0.1)
    found = [
        torch.autograd.grad(loss, leaves, torch.full_like(loss, factor), retain_graph=factor != 3)
        for factor in (1, 2, 3)
    ]
    for factor, gradients in enumerate(found, start=1):
        for a, b in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(a, factor * b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves, torch.ones_like(loss))
    return [loss.detach(), *found[0]]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_may_run_again(pair: Pair, reduction: str) -> None:
    options = {"reduction": reduction, "z_loss": 0.1, "upstream": 1.0}
    _assert_within_budget(pair(run_again, reduction=reduction), **options)


def run_frozen(trainable: str, reduction: str) -> list[Tensor]:
    hidden, weight, bias, labels = _inputs()
    given = {"hidden": _here(hidden), "weight": _own(weight, SIZES), "bias": _own(bias, SIZES)}
    given[trainable].requires_grad_()
    operator(**given, labels=_here(labels), reduction=reduction).sum().backward()
    assert all(t.grad is None for name, t in given.items() if name != trainable)
    return [given[trainable].grad]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_wanted_gradients(pair: Pair, reduction: str) -> None:
    expected = _run(tigon.linear_cross_entropy, *_inputs(), 1.0, reduction=reduction)
    for name, whole in zip(("hidden", "weight", "bias"), expected[1:], strict=True):
        first, second = (result[0] for result in pair(run_frozen, trainable=name, reduction=reduction))
        torch.testing.assert_close(first if name == "hidden" else torch.cat((first, second)), whole)


# Layouts, dtypes, compilation.


def run_layout(is_autocast: bool) -> list[Tensor]:
    hidden, weight, bias, labels = _layout()
    weight = _own(weight, SIZES).t().contiguous().t()
    with tigon.backend(HALF if is_autocast else "auto"), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        return _run(operator, _here(hidden)[:, :-1], weight, _own(bias, SIZES), _here(labels)[:, 1:], 1.0)


def _layout() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, bias, labels = _inputs(rows=12)
    return hidden.view(2, 6, 8), weight, bias, labels.view(2, 6)


def test_leading_axes_and_strides(pair: Pair) -> None:
    actual = _assert_same(pair(run_layout, is_autocast=False))
    hidden, weight, bias, labels = _layout()
    expected = _run(tigon.linear_cross_entropy, hidden[:, :-1], weight, bias, labels[:, 1:], 1.0)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif(os.environ["TIGON_TEST_DEVICE"] != "cpu", reason="autocast of the CPU")
def test_autocast(pair: Pair) -> None:
    actual = _assert_same(pair(run_layout, is_autocast=True))
    hidden, weight, bias, labels = _layout()
    hidden, labels = hidden[:, :-1], labels[:, 1:]
    with torch.autocast("cpu", torch.bfloat16):
        low = _run(linear_cross_entropy_reference, hidden, weight, bias, labels, 1.0)
    high = _run(linear_cross_entropy_reference, hidden.double(), weight.double(), bias.double(), labels, 1.0)
    assert all(t.dtype == torch.float32 for t in actual)
    for name, a, b, c in zip(NAMES, actual, low, high, strict=True):
        assert_within_budget(name, a, b, c)


def run_compiled(is_dynamic: bool, **options: Any) -> list[Tensor]:
    torch._dynamo.reset()
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)
    results = []
    # More rows than before: another graph, or the same where the shapes are symbols.
    for rows in (5, 9, 11):
        hidden, weight, bias, labels = _inputs(rows=rows)
        given = _here(hidden), _own(weight, SIZES), _own(bias, SIZES), _here(labels)
        with torch._dynamo.config.patch(error_on_recompile=is_dynamic and rows > 5):
            results = _run(compiled, *given, **options)
        for a, b in zip(results, _run(operator, *given, **options), strict=True):
            torch.testing.assert_close(a, b)
    return results


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_a_break(pair: Pair, reduction: str, is_dynamic: bool) -> None:
    options = {"reduction": reduction, "label_smoothing": 0.1}
    _assert_within_budget(pair(run_compiled, is_dynamic=is_dynamic, **options), **options)


# One process.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("has_group", [False, True])
def test_one_process_computes_linear_cross_entropy(
    backend: str, device: torch.device, has_group: bool, reduction: str, tmp_path: Path
) -> None:
    hidden, weight, bias, labels = (None if t is None else t.to(device) for t in _inputs())
    options = OPTIONS["all"] | {"reduction": reduction}
    expected = _run(tigon.linear_cross_entropy, hidden, weight, bias, labels, **options)
    if has_group:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    try:
        actual = _run(operator, hidden, weight, bias, labels, **options)
    finally:
        if has_group:
            dist.destroy_process_group()
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(29, 7)}, r"hidden: expected last axis 7, got shape \(11, 8\)"),
        ({"weight": torch.randn(29)}, r"weight: expected two axes, got shape \(29,\)"),
        ({"bias": torch.randn(28)}, r"bias: expected shape \(29,\), got \(28,\)"),
        ({"labels": torch.zeros(10, dtype=torch.int64)}, r"labels: expected shape \(11,\), got \(10,\)"),
        ({"labels": torch.zeros(11)}, "labels: expected an integer dtype"),
        ({"weight": torch.randn(0, 8), "bias": None}, "classes: expected at least one, got 0"),
        ({"vocab_start": -1}, r"vocab_start: expected a finite number in \[0, inf\], got -1"),
        ({"vocab_start": 3}, "vocab_start: expected a shard that begins at 0"),
        ({"max_logits_bytes": 100}, "max_logits_bytes: expected at least"),
        ({"label_smoothing": 2.0}, "label_smoothing: expected a finite number"),
        ({"reduction": "max"}, "reduction: expected one of"),
        ({"num_items": 3, "reduction": "sum"}, "num_items: expected None unless"),
        ({"group": "world"}, "group: expected None before torch.distributed is initialized"),
        ({"weight": torch.randn(29, 8).double(), "bias": None}, "weight: expected dtype torch.float32 of hidden"),
        ({"weight": torch.randn(29, 8).as_subclass(type("Sharded", (Tensor,), {}))}, "weight: expected a plain tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    hidden, weight, bias, labels = _inputs()
    given = {"hidden": hidden, "weight": weight, "bias": bias, "labels": labels} | change
    with pytest.raises(ValueError, match=f"^vocab_parallel_linear_cross_entropy: {message}"):
        operator(**given)
