"""Whole training steps: what is measured, how kernels are sorted, how rows become tables and plots."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import tigon
from tigon import cli
from tigon.bench import step, step_rows, store
from tigon.bench.step_kinds import KINDS, Launch, Sizes, by_kind, kind_of, launches_in
from tigon.bench.step_rows import LongestRow, StepRow
from tigon.bench.step_train import Plan, Trainer, attention_of, build, longest, measure, text_batches, words_as_tokens
from tigon.bench.step_variants import DEFAULT, VARIANTS, Variant, num_changed

ROOT = Path(__file__).parents[2]
TINY = {
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return Plan(
        path, batch=2, seq=24, steps=3, dtype="float32", lr=1e-2, ramp=3, device="cpu", command="tigon bench step"
    )


def _quiet(text: str) -> None:
    pass


# ---- text ----


def test_frequent_words_have_low_numbers_below_the_vocabulary() -> None:
    assert words_as_tokens("b a, a c a b", 100).tolist() == [1, 0, 2, 0, 3, 0, 1]
    assert words_as_tokens("a b c d", 3).tolist() == [0, 1, 2, 0]


def test_batches_are_windows_of_text_and_depend_on_the_text_seed_alone(plan: Plan) -> None:
    batches = text_batches(plan, 199, 4)
    assert batches.shape == (4, 2, 24)
    assert int(batches.max()) < 199
    assert torch.equal(batches, text_batches(dataclasses.replace(plan, seed=5, steps=9), 199, 4))
    assert not torch.equal(batches, text_batches(dataclasses.replace(plan, text_seed=1), 199, 4))
    # Longer than the text: it begins again.
    assert text_batches(dataclasses.replace(plan, seq=300_000), 199, 1).shape == (1, 2, 300_000)


# ---- training ----


def test_variants_begin_with_equal_weights(plan: Plan) -> None:
    first, second = build(plan), build(plan)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build(dataclasses.replace(plan, seed=1))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_a_patched_model_trains_alike_and_says_what_was_replaced(plan: Plan) -> None:
    said: list[str] = []
    with tigon.backend("torch"):
        native, patched, fused = (
            measure(plan, VARIANTS[name], said.append) for name in ("native", "tigon", "tigon_fused")
        )
    assert native["status"] == patched["status"] == "ok"
    assert len(native["losses"]) == plan.warmup + plan.steps
    assert native["losses"][-1] < native["losses"][0] - 0.2
    for other in (patched, fused):
        assert other["losses"] == pytest.approx(native["losses"], abs=1e-3)
    assert native["replaced"] == 0
    # Five norms, two MLPs, two attentions, the head and the model; with the fusions both layers.
    assert (patched["replaced"], fused["replaced"]) == (11, 13)
    assert len(native["samples_ms"]) == plan.steps
    assert set(native["kinds_ms"]) == set(KINDS)
    for kind in ("products", "attention", "pointwise", "loss", "optimiser"):
        assert native["kinds_ms"][kind] > 0, kind
    assert any("11 modules replaced" in line for line in said)


def test_checkpointing_and_clipping_reach_the_model(plan: Plan) -> None:
    plain = measure(dataclasses.replace(plan, profile=False), VARIANTS["native"], _quiet)
    assert plain["kinds_ms"] == {}
    again = measure(dataclasses.replace(plan, profile=False, checkpointing=True), VARIANTS["native"], _quiet)
    assert again["losses"] == pytest.approx(plain["losses"], abs=1e-5)
    assert build(dataclasses.replace(plan, checkpointing=True)).is_gradient_checkpointing
    clipped = measure(dataclasses.replace(plan, profile=False, clip=1e-12), VARIANTS["native"], _quiet)
    assert clipped["losses"][0] == plain["losses"][0]
    assert clipped["losses"] != pytest.approx(plain["losses"], abs=1e-3)


def test_the_rate_rises_to_the_one_given(plan: Plan) -> None:
    trainer = Trainer(plan, VARIANTS["native"])
    rates = []
    for batch in text_batches(plan, 199, 4):
        trainer.step(batch)
        rates.append(trainer.optimiser.param_groups[0]["lr"])
    assert rates == pytest.approx([plan.lr / 3, 2 * plan.lr / 3, plan.lr, plan.lr])


def test_attention_is_the_one_named(plan: Plan) -> None:
    def asked(attention: str) -> tuple[str, bool, bool]:
        named = dataclasses.replace(plan, attention=attention)
        with attention_of(named):
            return (
                build(named).config._attn_implementation,
                torch.backends.cuda.flash_sdp_enabled(),
                torch.backends.cuda.cudnn_sdp_enabled(),
            )

    assert asked("sdpa") == ("sdpa", True, True)
    assert asked("eager") == ("eager", True, True)
    assert asked("cudnn") == ("sdpa", False, True)
    assert asked("flash") == ("sdpa", True, False)
    assert asked("efficient") == ("sdpa", False, False)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("tried to allocate"), RuntimeError("CUDA error: out of memory")],
    ids=lambda error: type(error).__name__,
)
def test_running_out_of_memory_is_a_row(plan: Plan, error: RuntimeError) -> None:
    def fail(model: Any) -> None:
        raise error

    variant = Variant("native", fail)
    result = measure(plan, variant, _quiet)
    assert result["status"] == "out of memory"
    row = step.row_of(plan, variant, [result])
    assert (row.status, row.tokens_per_s, row.losses) == ("out of memory", 0.0, [])
    assert "out of memory" in step_rows.text_table([row])


def test_other_errors_are_not_out_of_memory(plan: Plan) -> None:
    def fail(model: Any) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        measure(plan, Variant("native", fail), _quiet)


def test_changed_modules_are_counted() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.ReLU())
    classes = [type(module) for module in model.modules()]
    assert num_changed(model, classes) == 0
    model[0].forward = types.MethodType(lambda self, x: x, model[0])
    model[2].__class__ = torch.nn.SiLU
    assert num_changed(model, classes) == 2


def test_rounds_are_joined(plan: Plan) -> None:
    result = measure(dataclasses.replace(plan, profile=False), VARIANTS["native"], _quiet)
    first = {**result, "samples_ms": [10.0, 20.0, 30.0], "peak_gib": 1.0, "first_step_s": 9.0}
    second = {**result, "samples_ms": [40.0, 50.0], "peak_gib": 2.0, "first_step_s": 1.0, "kinds_ms": {"loss": 1.0}}
    row = step.row_of(plan, VARIANTS["native"], [first, second])
    assert (row.step_ms, row.low_ms, row.high_ms, row.peak_gib, row.first_step_s) == (30.0, 10.0, 50.0, 2.0, 9.0)
    assert row.tokens_per_s == 1600.0
    assert row.kinds_ms == {"loss": 1.0}
    assert step.row_of(plan, VARIANTS["native"], [first, {**second, "status": "out of memory"}]).status != "ok"


# ---- the longest sequence ----


@pytest.mark.parametrize(("first", "fixed", "per_token"), [(8192, 60.0, 1e-3), (1024, 4.0, 2e-4), (65536, 20.0, 3e-3)])
def test_longest_sequence_is_found_in_few_tries(first: int, fixed: float, per_token: float) -> None:
    def fits(length: int) -> float | None:
        peak = fixed + per_token * length + (per_token * length) ** 2 * 1e-5
        return peak if peak < 139.0 else None

    found, tried = longest(fits, first, 140.0)
    assert fits(found) is not None
    assert fits(found + max(1024, found // 64)) is None
    assert tried[found] > 0
    assert len(tried) <= 13, tried


def test_longest_sequence_has_ends() -> None:
    assert longest(lambda length: None, 4096, 1.0)[0] == 0
    assert longest(lambda length: 1.0, 4096, 2.0, most=2**15)[0] == 2**15


# ---- kinds ----

SIZES = Sizes(vocab=128256, seq=1024)
PRODUCT = "nvjet_tst_128x256_64x4_1x2_h_bz_coopB_TNT"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>"
NAMED = {
    PRODUCT: "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>": "products",
    "void cublasLt::splitKreduce_kernel<32, 16, int>": "products",
    "_matmul_kernel": "products",
    "triton_tem_fused_mm_12": "products",
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<SoftMaxForwardEpilogue>": "attention",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>": "loss",
    "liger_cross_entropy_kernel": "loss",
    "_anchored_kernel": "loss",
    "triton_red_fused__log_softmax__to_copy_nll_loss_forward_3": "loss",
    "_rms_norm_bwd_kernel": "pointwise",
    "_glu_fwd_kernel": "pointwise",
    "_qk_norm_rope_fwd_kernel": "pointwise",
    "_geglu_tanh_forward_kernel": "pointwise",
    "_triton_rope": "pointwise",
    "triton_poi_fused_add_mm_mul_silu_7": "pointwise",
    ELEMENTWISE: "pointwise",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<bf16>": "pointwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, MeanOps>>": "pointwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimiser",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<bf16>": "other",
    "Memset (Device)": "other",
    "a_kernel_of_nobody": "other",
}


@pytest.mark.parametrize("name", NAMED)
def test_kernels_are_known_by_name(name: str) -> None:
    assert kind_of(Launch(name, 1.0), SIZES) == NAMED[name]


def test_kernels_are_known_by_what_launched_them() -> None:
    def kind(name: str, *operators: str, shape: tuple[int, ...] = (8, 1024, 2048)) -> str:
        return kind_of(Launch(name, 1.0, operators, (shape,)), SIZES)

    assert kind(ELEMENTWISE, "aten::add") == "pointwise"
    assert kind(ELEMENTWISE, "aten::copy_", "aten::_to_copy", shape=(8, 1024, 128256)) == "loss"
    assert kind(ELEMENTWISE, "aten::mul", shape=(8, 32, 1024, 1024)) == "attention"
    assert kind(ELEMENTWISE, "aten::add_", shape=(1024, 1024)) == "pointwise"
    assert kind(ELEMENTWISE, "aten::add_", "Optimizer.step#AdamW.step") == "optimiser"
    assert kind(PRODUCT, "aten::mm", shape=(8192, 128256)) == "products"
    assert kind(PRODUCT, "aten::bmm", shape=(256, 1024, 64)) == "attention"
    assert kind("liger_cross_entropy_kernel", "aten::mm") == "loss"


def test_kinds_are_of_one_step_and_the_host_has_the_rest() -> None:
    kinds = by_kind([Launch(PRODUCT, 6.0), Launch(PRODUCT, 2.0), Launch(ELEMENTWISE, 1.0)], SIZES, 2, 10.0)
    assert list(kinds) == list(KINDS)
    assert (kinds["products"], kinds["pointwise"], kinds["host_gap"]) == (4.0, 0.5, 5.5)
    assert by_kind([Launch(PRODUCT, 6.0)], SIZES, 1, 5.0)["host_gap"] == 0.0


def _event(name: str, device: str = "CPU", us: float = 0.0, **fields: Any) -> Any:
    usual = {"kernels": [], "input_shapes": [], "cpu_parent": None, "self_cpu_time_total": 0.0}
    span = types.SimpleNamespace(elapsed_us=lambda: us)
    return types.SimpleNamespace(name=name, device_type=f"DeviceType.{device}", time_range=span, **{**usual, **fields})


STEP = "Optimizer.step#SGD.step"


def test_kernels_of_no_operator_are_counted_once() -> None:
    outer = _event("aten::linear", input_shapes=[[8, 1024, 2048], [], "x"])
    copy = types.SimpleNamespace(name=ELEMENTWISE, duration=300.0)
    events = [
        outer,
        _event("aten::copy_", kernels=[copy], cpu_parent=outer),
        _event(ELEMENTWISE, "CUDA", 300.0),
        _event(ELEMENTWISE, "CUDA", 200.0),
        _event("_glu_fwd_kernel", "CUDA", 50.0),
        _event("Optimizer.step#AdamW.step", "CUDA", 999.0, is_user_annotation=True),
        _event("ProfilerStep#1", "CUDA", 999.0),
        _event("Torch-Compiled Region: 0/0"),
        _event("Torch-Compiled Region: 0/0", "CUDA", 999.0),
        # As some versions have it: not marked, and linked from the host's range.
        _event(
            "Optimizer.step#SGD.step", kernels=[types.SimpleNamespace(name="Optimizer.step#SGD.step", duration=999.0)]
        ),
        _event("Optimizer.step#SGD.step", "CUDA", 999.0),
    ]
    launches = list(launches_in(events, on_device=True))
    assert launches[0] == Launch(ELEMENTWISE, 0.3, ("aten::copy_", "aten::linear"), ((8, 1024, 2048),))
    assert [(launch.name, round(launch.ms, 6)) for launch in launches[1:]] == [
        (ELEMENTWISE, 0.2),
        ("_glu_fwd_kernel", 0.05),
    ]


def test_no_kernel_takes_longer_than_on_the_device() -> None:
    # As one version links them: each operator of an optimiser has the kernels of all.
    kernels = [types.SimpleNamespace(name="multi_tensor_apply_kernel", duration=100.0)] * 3
    events = [_event("aten::_fused_adamw_", kernels=kernels) for _ in range(3)]
    events += [_event("multi_tensor_apply_kernel", "CUDA", 100.0) for _ in range(3)]
    launches = list(launches_in(events, on_device=True))
    assert sum(launch.ms for launch in launches) == pytest.approx(0.3)
    assert {kind_of(launch, Sizes(7, 7)) for launch in launches} == {"optimiser"}


# ---- rows, tables, plots ----


def _row(implementation: str = "tigon", tokens: float = 2000.0, **fields: Any) -> StepRow:
    usual: dict[str, Any] = {
        "case": "small-1b",
        "batch": 8,
        "seq": 1024,
        "checkpointing": False,
        "dtype": "bfloat16",
        "attention": "sdpa",
        "version": "0.8.5" if implementation.startswith("liger") else "1",
        "status": "ok",
        "gpu": "NVIDIA H200",
        "torch": "2.11",
        "triton": "3.6",
        "transformers": "5.17",
        "commit": "abc",
        "date": "2026-12-01",
        "command": "tigon bench step",
        "peak_gib": 20.0,
        "tokens_per_s": tokens,
        "step_ms": 4.0,
        "losses": [9.0, 8.5],
        "kinds_ms": dict.fromkeys(KINDS, 0.5),
    }
    return StepRow(implementation=implementation, **{**usual, **fields})


def _longest(implementation: str, tokens: int) -> LongestRow:
    names = {f.name for f in dataclasses.fields(LongestRow)}
    shared = {k: v for k, v in dataclasses.asdict(_row(implementation)).items() if k in names}
    return LongestRow(**shared, longest=tokens, peaks_gib={str(tokens): 130.0})


def test_rows_are_read_as_written_and_replace_their_case(tmp_path: Path) -> None:
    path = step_rows.write([_row("native"), _row("tigon"), _row("tigon", seq=2048)], tmp_path)
    assert path == tmp_path / "nvidia-h200" / "step.jsonl"
    step_rows.write([_row("tigon", 3000.0)], tmp_path)
    found = step_rows.rows_in(tmp_path, StepRow)
    assert [(row.implementation, row.seq, row.tokens_per_s) for row in found] == [
        ("tigon", 2048, 2000.0),
        ("tigon", 1024, 3000.0),
    ]
    assert found[1] == _row("tigon", 3000.0)
    assert step_rows.write([_longest("tigon", 4096)], tmp_path).name == "longest.jsonl"
    assert step_rows.rows_in(tmp_path, LongestRow) == [_longest("tigon", 4096)]
    # Tables of operators are made from other files of the folder.
    from tigon.bench import report

    assert report.rows_in(tmp_path) == []
    path.write_text("{}\n")
    with pytest.raises(ValueError, match=r"step\.jsonl:1"):
        store.read(path, StepRow)


def test_tables_compare_with_native_and_liger_and_mark_another_training() -> None:
    rows = [
        _row("tigon", 3000.0, peak_gib=15.0),
        _row("liger", 2400.0, losses=[9.0, float("nan")]),
        _row("native", 2000.0, kinds_ms={}),
        _row("native_compile", status="out of memory", tokens_per_s=0.0, losses=[], kinds_ms={}),
    ]
    table = step_rows.markdown_tables(rows, [_longest("liger", 1000), _longest("tigon", 1500)])
    lines = table.splitlines()
    assert "| small-1b, 8 x 1024 | tigon | **3,000** | 1.50 | 1.25 | 15.0 | 0.75 | 0.0 | 9.000 to 8.500 |" in lines
    assert "| small-1b, 8 x 1024 | liger | 2,400 | 1.20 | 1.00 | 20.0 | 1.00 | 0.0 | 9.000 to nan † |" in lines
    assert "| small-1b, 8 x 1024 | native_compile | out of memory | - | - | - | - | - | - |" in lines
    order = [line.split(" | ")[1] for line in lines if line.startswith("| small-1b, 8 x 1024 |")]
    assert order == ["native", "native_compile", "liger", "tigon", "liger", "tigon"]
    assert "| small-1b, batch 8 | tigon | 1,500 | - | 1.50 |" in lines
    assert "Liger-Kernel 0.8.5" in table
    assert step_rows.markdown_tables([], []) == "No rows yet."


def test_distance_of_losses() -> None:
    native = _row("native")
    assert step_rows.loss_distance(_row(losses=[9.0, 8.6]), native) == pytest.approx(0.1)
    assert step_rows.loss_distance(_row(losses=[float("nan"), 8.5]), native) == float("inf")
    assert step_rows.loss_distance(_row(losses=[]), native) is None
    assert step_rows.loss_distance(native, None) is None


def test_documented_fields_are_fields() -> None:
    for kind in (StepRow, LongestRow):
        names = {f.name for f in dataclasses.fields(kind)}
        documented = [
            line.strip().split(":")[0] for line in (kind.__doc__ or "").splitlines() if line.startswith(" " * 8)
        ]
        assert {name for name in documented if name.isidentifier()} <= names


def test_plots_are_written_for_each_case(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        _row("native"),
        _row("tigon"),
        _row("liger", status="out of memory", losses=[], kinds_ms={}, tokens_per_s=0.0),
    ]
    paths = step_rows.plots([*rows, _row("native", seq=2048, attention="eager", text_seed=1)], tmp_path)
    assert [path.name for path in paths] == [
        "step-small-1b-8x1024.png",
        "step-small-1b-8x1024.svg",
        "step-small-1b-8x2048-eager-attention-text-1.png",
        "step-small-1b-8x2048-eager-attention-text-1.svg",
    ]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"<?xml")
    step_rows.write(rows, tmp_path)
    assert cli.main(["bench", "step", "--plot", "--output", str(tmp_path)]) == 0
    assert (tmp_path / "nvidia-h200" / paths[0].name).read_bytes() == paths[0].read_bytes()


def test_page_shows_the_committed_rows(tmp_path: Path) -> None:
    page, copy = ROOT / "docs" / "performance.md", tmp_path / "page.md"
    copy.write_text(page.read_text())
    step_rows.write_into(copy, ROOT / "benchmarks" / "results")
    assert copy.read_text() == page.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "models").glob("*.json")), ids=lambda path: path.stem)
def test_committed_configurations_are_of_the_size_in_their_name(path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    named = float(path.stem.rpartition("-")[2].removesuffix("b"))
    # Names leave out embeddings or round down.
    assert 0.95 * named < billions < 1.4 * named


# ---- the command ----


def test_wrong_options_are_named(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*options: str) -> str:
        assert cli.main(["bench", "step", *options]) == 2
        return capsys.readouterr().err

    model = ("--model", str(plan.model))
    assert "tigon bench: step: --model: expected a configuration file" in error()
    assert "--model: no file nowhere.json" in error("--model", "nowhere.json")
    assert "--warmup: expected at least 3, got 2" in error(*model, "--warmup", "2")
    assert "TRITON_INTERPRET" in error(*model)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "--max-context: needs a CUDA device" in error(*model, "--device", "cpu", "--max-context")
    assert "expected some of native" in error(*model, "--peers", "native,tiger", "--device", "cpu")
    assert "--readme: expected --output" in error("--readme", "x.md")
    assert "at least one that can run here" in error(*model, "--peers", "tigon_graph", "--device", "cpu")


def test_command_of_a_row_says_all_that_was_asked_for(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    words = ["bench", "step", "--model", str(plan.model), "--device", "cpu", "--text-seed", "3", "--checkpointing"]
    command = step.plan_of(cli.build_parser().parse_args(words)).command
    assert command.startswith("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True tigon bench step --model ")
    assert command.endswith("--text-seed 3 --checkpointing")


def test_peers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Variant("liger", VARIANTS["liger"].prepare, "a_package_of_nobody")
    monkeypatch.setitem(VARIANTS, "liger", absent)
    said: list[str] = []
    chosen = step.chosen_variants("native,liger,tigon_graph", "cpu", said.append)
    assert [variant.name for variant in chosen] == ["native"]
    assert said[0] == "liger: left out: a_package_of_nobody is not installed"
    assert set(DEFAULT) <= set(VARIANTS)


def test_each_variant_has_a_process_of_its_own(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    options = ["--batch", "2", "--seq", "24", "--steps", "2", "--dtype", "float32", "--device", "cpu"]
    output = tmp_path / "results"
    words = ["bench", "step", "--model", str(plan.model), *options, "--peers", "native,tigon", "--output", str(output)]
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "tigon: first step" in shown.err
    assert "wrote" in shown.out
    native, ours = step_rows.rows_in(output, StepRow)
    assert (native.implementation, ours.implementation) == ("native", "tigon")
    assert ours.losses == pytest.approx(native.losses, abs=1e-4)
    assert (native.batch, native.seq, native.case) == (2, 24, "tiny")
    assert "--peers native,tigon --dtype float32" in native.command

    broken = dataclasses.replace(plan, model=tmp_path / "broken.json")
    broken.model.write_text('{"model_type": "no_such_model"}')
    with pytest.raises(RuntimeError, match="no_such_model"):
        step.in_process(measure, broken, "native", _quiet)
