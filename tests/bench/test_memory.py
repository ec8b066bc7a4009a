"""What a step holds, added up without memory, is what it holds."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from tigon import cli
from tigon.bench import memory, step_rows
from tigon.bench.memory import GIB, Memory, Tracker, by_module, kernels_without_a_device, of_step, prepared, recommended
from tigon.bench.step_rows import StepRow
from tigon.bench.step_train import Plan, build
from tigon.bench.step_variants import VARIANTS

ROOT = Path(__file__).parents[2]
BATCH, SEQ, HIDDEN, INNER, LAYERS = 2, 64, 64, 160, 3
TINY = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return Plan(path, batch=BATCH, seq=SEQ, device="cpu")


def test_tracker_counts_storages_while_they_live() -> None:
    given = torch.zeros(100)
    with Tracker([given]) as tracker:
        a = torch.empty(256)
        view = a[:10].view(2, 5)
        given.add_(1)
        assert (tracker.now, tracker.peak) == (1024, 1024)
        b = torch.empty(1)
        assert tracker.now == 1024 + 512
        del a
        assert tracker.now == 1024 + 512
        del view
        assert tracker.now == 512
        c = a_temporary_inside(b)
        assert (tracker.now, tracker.peak) == (1024, 512 + 4096 + 512)
        del b, c
        assert tracker.now == 0


def a_temporary_inside(x: torch.Tensor) -> torch.Tensor:
    large = torch.empty(1024)
    return large.new_empty(1).copy_(x)


@pytest.mark.parametrize(
    ("name", "checkpointing"), [*((name, False) for name in memory.DEFAULT), ("native", True), ("tigon_fused", True)]
)
def test_a_step_without_memory_holds_what_one_with_memory_does(plan: Plan, name: str, checkpointing: bool) -> None:
    """On the meta device as on a CPU, with launches left out on both: sizes, lifetimes, reuse of inputs."""
    plan = dataclasses.replace(plan, checkpointing=checkpointing)
    planned = of_step(prepared(plan, VARIANTS[name]), VARIANTS[name], BATCH, SEQ)
    assert (planned.variant, planned.checkpointing) == (name, checkpointing)

    model = build(plan)
    VARIANTS[name].prepare(model)
    tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert planned.weights == weights
    tracker = Tracker([*model.parameters(), *model.buffers(), tokens])
    with kernels_without_a_device(), tracker:
        loss = model(input_ids=tokens, labels=tokens).loss
        saved = tracker.now
        loss.backward()
    assert planned.saved == saved
    # The loss has other tiles on a CPU.
    assert planned.peak == pytest.approx(3 * weights + tracker.peak, rel=0.01)


def test_a_fused_mlp_saves_its_input_gate_and_up(plan: Plan) -> None:
    """By the formula of the operator's page: x, a number a row, gate and up, of 2 bytes each."""
    rows = {row.modules: row for row in by_module(prepared(plan, VARIANTS["tigon_fused"]), BATCH, SEQ)}
    mlp = rows["model.layers.*.mlp"]
    tokens = BATCH * SEQ
    assert mlp.count == LAYERS
    assert mlp.bytes_each == 2 * tokens * HIDDEN + 4 * tokens + 2 * 2 * tokens * INNER
    assert "2 of 128x160 bfloat16" in mlp.tensors
    recomputed = {row.modules: row for row in by_module(prepared(plan, VARIANTS["tigon_recompute"]), BATCH, SEQ)}
    assert recomputed["model.layers.*.mlp"].bytes_each <= 2 * tokens * HIDDEN + 4 * tokens


def test_layers_and_the_rest_are_all_that_is_held(plan: Plan) -> None:
    for name in ("native", "tigon"):
        model = prepared(plan, VARIANTS[name])
        rows = by_module(model, BATCH, SEQ)
        total = sum(row.bytes_each * row.count for row in rows)
        assert total == pytest.approx(of_step(model, VARIANTS[name], BATCH, SEQ).saved, rel=0.02), name
        assert all(row.bytes_each >= 0 for row in rows)
        # A row of all layers shows what the last one saves, without the tables that the first saves for all.
        assert not any("1x1x" in text or "1x64x" in text for row in rows if row.count == LAYERS for text in row.tensors)


def test_patching_and_recomputing_save_memory(plan: Plan) -> None:
    found = {name: of_step(prepared(plan, VARIANTS[name]), VARIANTS[name], BATCH, SEQ) for name in memory.DEFAULT}
    order = ["native", "tigon", "tigon_fused", "tigon_recompute"]
    for more, less in itertools.pairwise(order):
        assert found[less].saved < found[more].saved, (more, less)


def test_the_least_recomputation_that_fits_is_recommended() -> None:
    peaks = {
        ("tigon_fused", False): 60,
        ("tigon_recompute", False): 40,
        ("tigon_fused", True): 20,
        ("tigon_tiled", True): 10,
    }
    found = {key: Memory(key[0], key[1], GIB, GIB, peak * GIB) for key, peak in peaks.items()}
    for available, expected in (
        (80.0, "tigon_fused"),
        (60.0, "tigon_recompute"),
        (24.0, "tigon_fused + checkpointing"),
    ):
        best = recommended(found, available)
        assert best is not None
        assert best.label == expected
    assert recommended(found, 10.0) is None


ROWS = [
    row
    for row in step_rows.rows_in(ROOT / "benchmarks" / "results", StepRow)
    if row.status == "ok" and row.implementation in memory.DEFAULT and row.gpu != "cpu"
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.case}-{row.implementation}-{row.batch}x{row.seq}")
def test_measured_peaks_are_as_planned(row: StepRow) -> None:
    plan = Plan(
        ROOT / "benchmarks" / "models" / f"{row.case}.json",
        checkpointing=row.checkpointing,
        dtype=row.dtype,
        attention=row.attention,
    )
    variant = VARIANTS[row.implementation]
    planned = of_step(prepared(plan, variant), variant, row.batch, row.seq)
    assert planned.peak / GIB == pytest.approx(row.peak_gib, rel=0.03)


def test_command_shows_all_ways_and_recommends_one(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["memory", str(plan.model), "--batch", "2", "--seq", "64", "--layers", "tigon_fused"]
    assert cli.main([*words, "--gpu-memory", "1"]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.*.mlp" in shown
    for name, checkpointing in memory.WAYS:
        assert f"{name}{' + checkpointing' if checkpointing else ''}  " in shown
    assert 'For 1.0 GiB: tigon_fused, 0.00 GiB.\n  tigon.patch(model, fuse=["qk_norm_rope"' in shown
    assert cli.main([*words[:-2], "--gpu-memory", "0.0001"]) == 1
    shown = capsys.readouterr().out
    assert "does not fit" in shown
    assert "Nothing fits into 0.0 GiB; " in shown


def test_longest_sequence_fits_and_a_longer_one_does_not(plan: Plan) -> None:
    variant = VARIANTS["tigon_tiled"]
    model = prepared(plan, variant)
    available = 0.1
    length = memory.longest_of(model, variant, plan, available)
    assert length >= 1024
    limit = memory._USABLE * available * GIB
    assert of_step(model, variant, BATCH, length).peak <= limit
    assert of_step(model, variant, BATCH, length + max(1024, length // 64)).peak > limit


def test_wrong_options_are_named(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*options: str) -> str:
        assert cli.main(["memory", *options]) == 2
        return capsys.readouterr().err

    assert "tigon memory: no file nowhere.json" in error("nowhere.json")
    model = str(plan.model)
    assert "--batch: expected at least 1" in error(model, "--batch", "0")
    assert "--layers: expected one of native" in error(model, "--layers", "liger")
    assert "--gpu-memory: expected a positive number" in error(model, "--gpu-memory", "-1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--max-context: expected --gpu-memory" in error(model, "--max-context")


def test_what_is_put_in_place_of_a_device_is_taken_away() -> None:
    from tigon.ops import _op, rms_norm

    before = _op.why_no_kernels, torch.nn.functional.scaled_dot_product_attention, torch.is_autocast_enabled
    with kernels_without_a_device():
        assert rms_norm(torch.zeros(2, 8, device="meta"), torch.zeros(8, device="meta")).shape == (2, 8)
    assert before == (_op.why_no_kernels, torch.nn.functional.scaled_dot_product_attention, torch.is_autocast_enabled)
