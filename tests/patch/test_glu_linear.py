"""The fusion of a gated MLP with its projection back: when it is on, when it steps aside, and that neither shows."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.prune import random_unstructured

import tigon
from tigon.patch import _apply, _glu_linear

# Two tensors; gelu; one packed tensor; with factors of residuals.
FAMILIES = ("Llama", "Gemma2", "Phi3", "Granite")
EVERY = pytest.mark.parametrize("family", FAMILIES)


class Spy:
    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    @property
    def count(self) -> int:
        count = len(self.calls)
        self.calls.clear()
        return count


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The calls of the operator."""
    seen, operator = Spy(), _glu_linear.glu_linear
    monkeypatch.setattr(_glu_linear, "glu_linear", lambda *a, **k: seen.calls.append(k) or operator(*a, **k))
    monkeypatch.setattr(_glu_linear, "_noted", set())
    return seen


def fused(model: nn.Module, **options: Any) -> nn.Module:
    tigon.patch(model, fuse="glu_linear", **options)
    return model


def rows_of(report: Any) -> list[tuple[str, str, str, int]]:
    return [(row.variant, row.verdict, row.reason, row.count) for row in report if row.form == "glu_linear"]


@EVERY
def test_training_is_as_without_and_the_operator_is_called(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build(family)
    native, keys = step(model, batch), list(model.state_dict())
    before = [dict(module.__dict__) for module in model.modules()]
    report = tigon.patch(model, fuse="glu_linear", strict=True)
    assert rows_of(report) == [("down_proj", "replaced", "", 2)]
    assert [row.count for row in report if row.form == "glu"] == [2]
    assert_same_step(step(model, batch), native)
    used = [call["weight"] for call in spy.calls]
    assert all(a is layer.mlp.down_proj.weight for a, layer in zip(used, model.model.layers, strict=True))
    assert list(model.state_dict()) == keys
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


@EVERY
def test_generation_is_as_without(family: str, build: Any, batch: Any, spy: Spy) -> None:
    model = build(family).eval()
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(batch["input_ids"])}
    tokens = model.generate(batch["input_ids"], **options)
    fused(model)
    assert torch.equal(model.generate(batch["input_ids"], **options), tokens)
    assert spy.count == 8


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(
    use_reentrant: bool, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build("Llama")
    native = step(model, batch)
    fused(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same_step(step(model, batch), native)
    assert spy.count == 4


@pytest.mark.parametrize("how", ["fp32", "bf16", "autocast"])
def test_the_bits_are_those_of_the_separate_operators(how: str, build: Any, batch: Any, step: Any, spy: Spy) -> None:
    model = build("Phi3").to(torch.bfloat16 if how == "bf16" else torch.float32)
    tigon.patch(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        apart = step(model, batch)
        fused(model)
        together = step(model, batch)
    assert spy.count == 2
    assert torch.equal(together["loss"], apart["loss"])
    for name, want in apart["grads"].items():
        assert together["grads"][name].dtype == want.dtype
        assert torch.equal(together["grads"][name], want), name


@pytest.mark.kernels
def test_the_kernels_keep_no_product(
    build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy, device: torch.device
) -> None:
    model = build("Llama", num_hidden_layers=1).to(device)
    batch = {key: value.to(device) for key, value in batch.items()}
    native = step(model, batch)

    def wide() -> int:
        """Tensors of the intermediate size that a step keeps for backward, each memory once."""
        kept: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.shape[-1:] == (48,) and t.numel() == 48 * batch["input_ids"].numel():
                kept[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            assert_same_step(step(model, batch), native)
        return len(kept)

    tigon.patch(model)
    assert wide() == 3
    fused(model)
    assert wide() == 2
    assert spy.count == 1
    # Without hooks the gradients take the place of gate and up.
    assert_same_step(step(model, batch), native)


def test_copies_and_pickles_use_their_own_weights(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Llama")
    loss = model(**batch).loss
    fused(model)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.count == 2
    torch.testing.assert_close(loaded(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.count == 0
    torch.testing.assert_close(fused(loaded)(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.count == 2


def test_patching_again_adds_the_fusion_and_repeats_none(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Qwen3")
    before = [dict(module.__dict__) for module in model.modules()]
    assert rows_of(tigon.patch(model)) == []
    model(**batch)
    assert spy.count == 0
    assert rows_of(tigon.patch(model, fuse=["glu_linear"])) == [("down_proj", "replaced", "", 2)]
    again = tigon.patch(model, fuse=["glu_linear", "add_rms_norm", "qk_norm_rope"])
    assert rows_of(again) == [("down_proj", "replaced", "already patched", 2)]
    assert {row.form for row in again} >= {"glu", "add_rms_norm", "qk_norm_rope"}
    model(**batch)
    assert spy.count == 2
    assert rows_of(tigon.patch(model)) == [("down_proj", "replaced", "already patched", 2)]
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_the_fusion_follows_the_choice_of_modules_and_needs_the_gate(build: Any, batch: Any, spy: Spy) -> None:
    fused(build("Llama"), skip=["model.layers.0.mlp"])(**batch)
    assert spy.count == 1
    assert rows_of(tigon.patch(build("Llama"), fuse="glu_linear", only=["rms_norm"])) == []
    assert rows_of(tigon.patch(build("Llama"), fuse="glu_linear", skip="glu")) == []
    with tigon.patch_on_build(type(build("Llama")), fuse="glu_linear"):
        model = build("Llama")
    model(**batch)
    assert spy.count == 2


# ---- the projection is more than its parameters ----


class Scaled(nn.Linear):
    """A subclass; it has everything that a linear layer has."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Marked(torch.Tensor):
    """A tensor that is not plain, as a sharded or quantised weight."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


def subclassed(down: nn.Linear) -> None:
    down.__class__ = Scaled


def wrapped(down: nn.Linear) -> None:
    down.forward = lambda x: 2 * nn.Linear.forward(down, x)


def marked(down: nn.Linear) -> None:
    weight = down.weight.detach().as_subclass(Marked)
    del down.weight
    down.register_buffer("weight", weight)


def parametrised(down: nn.Linear) -> None:
    class Double(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    nn.utils.parametrize.register_parametrization(down, "weight", Double())


def pruned(down: nn.Linear) -> None:
    random_unstructured(down, "weight", amount=0.5)


class Gathered:
    """A weight that is whole only while the projection runs, as that of ZeRO-3 is."""

    def __init__(self, down: nn.Linear) -> None:
        self.whole = down.weight.detach().clone()
        down.weight.data = torch.empty(0)
        down.register_forward_pre_hook(self.gather)
        down.register_forward_hook(self.release)

    def gather(self, down: Any, args: Any) -> None:
        down.weight.data = self.whole

    def release(self, down: Any, args: Any, y: Any) -> None:
        pass


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "subclass": (subclassed, "its down_proj is a Scaled, not a plain nn.Linear"),
    "wrapped": (wrapped, "its down_proj has another forward than nn.Linear"),
    "parametrised": (parametrised, "its down_proj is a ParametrizedLinear, not a plain nn.Linear"),
    "pruned": (pruned, "its down_proj has hooks"),
    "gathered": (Gathered, "its down_proj has hooks"),
    "forward hook": (lambda m: m.register_forward_hook(lambda m, a, y: y * 2), "its down_proj has hooks"),
    "pre-forward hook": (lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 2,)), "its down_proj has hooks"),
    "backward hook": (lambda m: m.register_full_backward_hook(lambda m, i, o: (i[0] / 2,)), "its down_proj has hooks"),
    "backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(lambda m, o: (o[0] / 2,)),
        "its down_proj has hooks",
    ),
    "not plain": (marked, "its down_proj has, or is given, tensors that are not plain"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_projection_that_does_more_is_called(
    change: str,
    when: str,
    build: Any,
    batch: Any,
    step: Any,
    assert_same_step: Any,
    spy: Spy,
    caplog: pytest.LogCaptureFixture,
) -> None:
    function, reason = CHANGES[change]
    native, model = build("Llama"), build("Llama")
    torch.manual_seed(5)
    function(native.model.layers[1].mlp.down_proj)
    wanted = step(native, batch)
    if when == "after":
        fused(model)
    torch.manual_seed(5)
    function(model.model.layers[1].mlp.down_proj)
    # The plainness of a tensor is known when it is used: sharded ones are whole within the layer.
    is_seen = change != "not plain"
    fine, kept = ("down_proj", "replaced"), ("", "kept", reason, 1)
    if when == "before":
        assert rows_of(tigon.patch(model, fuse="glu_linear")) == (
            [(*fine, "", 1), kept] if is_seen else [(*fine, "", 2)]
        )
    with caplog.at_level(logging.INFO, logger="tigon"):
        for _ in range(2):
            assert_same_step(step(model, batch), wanted)
    assert spy.count == 2
    # Once, and only of what was put on a module.
    expected = [f"glu_linear is off in LlamaMLP: {reason}"] if when == "after" or not is_seen else []
    assert [record.message for record in caplog.records] == expected
    again = [(*fine, "already patched", 1), kept] if is_seen else [(*fine, "already patched", 2)]
    if when == "after":
        assert rows_of(tigon.patch(model, fuse="glu_linear")) == again


def test_a_change_undone_brings_the_fusion_back(build: Any, batch: Any, spy: Spy) -> None:
    model = fused(build("Llama"))
    handles = [layer.mlp.down_proj.register_forward_hook(lambda m, a, y: None) for layer in model.model.layers]
    model(**batch)
    assert spy.count == 0
    for handle in handles:
        handle.remove()
    model(**batch)
    assert spy.count == 2


def test_a_hook_for_all_modules_sees_the_projection(build: Any, batch: Any, spy: Spy) -> None:
    model = fused(build("Llama"))
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: seen.append(m))
    try:
        model(**batch)
    finally:
        handle.remove()
    assert [layer.mlp.down_proj in seen for layer in model.model.layers] == [True, True]
    assert spy.count == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("target", "count"), [("down_proj", 0), ("up_proj", 2), ("saved", 0)])
def test_adapters_train_as_without_patching(
    target: str, count: int, when: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        options = (
            {"target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
            if target == "saved"
            else {"target_modules": [target]}
        )
        return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **options)).train()

    native = step(adapted(build("Llama")), batch)
    spy.calls.clear()
    model = adapted(fused(build("Llama"))) if when == "before" else fused(adapted(build("Llama")))
    assert_same_step(step(model, batch), native)
    assert spy.count == count
    (row,) = rows_of(tigon.patch(model, fuse="glu_linear"))
    assert row[:2] == (("down_proj", "replaced") if count else ("", "kept"))
    assert bool("not a plain nn.Linear" in row[2]) == (not count)
    if not count:
        with pytest.raises(ValueError, match=r"not a plain nn\.Linear"):
            tigon.patch(model, fuse="glu_linear", strict=True)


def test_an_adapter_that_is_merged_and_taken_off_leaves_the_fusion(build: Any, batch: Any, spy: Spy) -> None:
    peft = pytest.importorskip("peft")
    model = fused(build("Llama"))
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["down_proj"])
    adapted = peft.get_peft_model(model, config).eval()
    loss = adapted(**batch).loss
    assert spy.count == 0
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.count == 2


def test_hooks_of_accelerate_get_the_projection(build: Any, batch: Any, spy: Spy) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = fused(build("Llama"))
    loss = model(**batch).loss
    assert spy.count == 2
    mlp = model.model.layers[0].mlp
    hooks.add_hook_to_module(mlp.down_proj, hooks.ModelHook())
    torch.testing.assert_close(model(**batch).loss, loss)
    assert spy.count == 1
    hooks.remove_hook_from_module(mlp.down_proj)
    # It leaves its bound forward on the instance.
    mlp.down_proj.__dict__.pop("forward", None)
    torch.testing.assert_close(model(**batch).loss, loss)
    assert spy.count == 2


def test_a_weight_in_another_dtype_is_left_to_the_projection(build: Any, batch: Any, step: Any, spy: Spy) -> None:
    """It raises there, or a module casts what it gives it."""
    model = fused(build("Llama", num_hidden_layers=1))
    mlp = model.model.layers[0].mlp
    mlp.down_proj.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="same dtype"):
        mlp(torch.randn(2, 3, 32))
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.randn(2, 3, 32)).dtype == torch.bfloat16
    assert spy.count == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda down: setattr(down.weight, "data", torch.empty(0)),
            "the weight of its down is not whole outside of it",
        ),
        (lambda down: down.to("meta"), "the weight of its down is on another device"),
        (lambda down: down.double(), "the weight of its down has another dtype than what it is multiplied with"),
        (
            lambda down: setattr(down, "bias", nn.Parameter(torch.ones(16, dtype=torch.float64))),
            "the weight of its down has another dtype than what it is multiplied with",
        ),
    ],
)
def test_what_the_operator_would_not_take_is_left_to_the_projection(change: Any, reason: str, spy: Spy) -> None:
    mlp, x = Mlp(), torch.randn(2, 3, 16)
    fused(mlp)
    change(mlp.down)
    settings, (gate, up) = mlp._tigon.settings.mlp, (mlp.gate(x), mlp.up(x))
    assert _glu_linear.why_apart(settings, mlp.down, gate, up) == reason
    # Its error is that of the projection.
    with pytest.raises((RuntimeError, NotImplementedError)):
        mlp(x)
    assert spy.count == 0


class Mlp(nn.Module):
    """A gated MLP; subclasses do something else with what they have."""

    bias = True

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(16, 24), nn.Linear(16, 24)
        self.down, self.act = nn.Linear(24, 16, bias=self.bias), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class NoBias(Mlp):
    bias = False


class Casts(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        product = self.act(self.gate(x)) * self.up(x)
        return self.down(product.to(self.down.weight.dtype))


class Scale(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Inner(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.gate(x)) * self.up(x)))


# By name: the module, and why it is kept.
MLPS: dict[str, tuple[type[Mlp], str]] = {
    "plain": (Mlp, ""),
    "no bias": (NoBias, ""),
    "casts": (Casts, ""),
    "scaled": (Scale, ""),
    "inner norm": (Inner, "its norm stands between the product and down"),
}


@pytest.mark.parametrize("name", MLPS)
def test_mlps_compute_the_same(name: str, spy: Spy) -> None:
    torch.manual_seed(0)
    cls, reason = MLPS[name]
    mlp, x, upstream = cls(), torch.randn(3, 4, 16), torch.randn(3, 4, 16)

    def run() -> list[Tensor]:
        mlp.zero_grad()
        leaf = x.clone().requires_grad_()
        y = mlp(leaf)
        y.backward(upstream)
        return [y, leaf.grad, *(p.grad for p in mlp.parameters())]

    native = run()
    assert rows_of(tigon.patch(mlp, fuse="glu_linear")) == [
        ("", "kept", reason, 1) if reason else ("down", "replaced", "", 1)
    ]
    for actual, wanted in zip(run(), native, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert spy.count == (not reason)


def test_a_projection_kept_in_fp32_gets_what_its_module_casts(spy: Spy) -> None:
    mlp = Casts().to(torch.bfloat16)
    mlp.down.float()
    x = torch.randn(3, 4, 16, dtype=torch.bfloat16)
    native = mlp(x)
    tigon.patch(mlp)
    apart = mlp(x)
    fused(mlp)
    assert mlp(x).dtype == torch.float32
    assert torch.equal(mlp(x), apart)
    with torch.autocast("cpu", torch.float16):
        assert mlp(x).dtype == torch.float16
    assert spy.count == 0
    torch.testing.assert_close(apart, native, rtol=0.02, atol=0.02)


def _wrong_value(*args: Any, weight: Tensor, **options: Any) -> Tensor:
    return reference(*args, weight=weight, **options) * (1 + 1e-3)


def _wrong_dweight(*args: Any, weight: Tensor, **options: Any) -> Tensor:
    return reference(*args, weight=weight.detach(), **options) + 0 * weight.sum()


def _wrong_dbias(*args: Any, bias: Tensor, **options: Any) -> Tensor:
    return reference(*args, bias=bias.detach(), **options) + 0 * bias.sum()


reference = _glu_linear.glu_linear_reference


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (_wrong_value, "no candidate computes the same"),
        (_wrong_dweight, "its gradient is not that of the formula it computes"),
        (_wrong_dbias, "its gradient is not that of the formula it computes"),
    ],
)
def test_the_trial_run_notices(wrong: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_apply, "_verdicts", {})
    monkeypatch.setattr(_glu_linear, "glu_linear_reference", wrong)
    report = tigon.patch(Mlp(), fuse="glu_linear")
    assert rows_of(report) == [("", "kept", reason, 1)]
    assert [row.form for row in report.replaced] == ["glu"]


# ---- compilers and sharding ----


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_compiled_model_has_the_fusion_in_one_graph(
    hooked: bool, backend: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    torch._dynamo.reset()
    model = build("Llama", num_hidden_layers=1)
    native = step(model, batch)
    fused(model)
    if hooked:
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, a, y: y * 1)
    model.zero_grad()
    output = torch.compile(model, fullgraph=True, backend=backend)(**batch, use_cache=False)
    output.loss.backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert_same_step({"loss": output.loss.detach(), "grads": grads}, native)
    torch._dynamo.reset()


@pytest.mark.kernels
def test_a_compiled_mlp_runs_the_kernels_of_the_fusion(device: torch.device) -> None:
    torch._dynamo.reset()
    mlp, x = Mlp().to(device), torch.randn(3, 4, 16, device=device)
    fused(mlp)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    wanted = torch.autograd.grad(mlp(x).sum(), list(mlp.parameters()))
    y = torch.compile(mlp, fullgraph=True, backend=backend)(x)
    for actual, want in zip(torch.autograd.grad(y.sum(), list(mlp.parameters())), wanted, strict=True):
        torch.testing.assert_close(actual, want)
    assert "glu_linear_bwd" in "".join(module.code for graph in graphs for module in graph.modules())
    torch._dynamo.reset()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("unit", "count"), [("layer", 4), ("mlp", 4), ("down_proj", 0)], ids=["layer", "mlp", "down_proj"]
)
def test_sharded_models_train_as_without_patching(
    unit: str, count: int, when: str, build: Any, batch: Any, spy: Spy, process_group: None
) -> None:
    """A layer or an MLP that is sharded as one unit is whole while it runs; a projection by itself is not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def sharded(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            fully_shard({"layer": layer, "mlp": layer.mlp, "down_proj": layer.mlp.down_proj}[unit], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters()]

    native = train(sharded(build("Llama")))
    model = build("Llama")
    model = sharded(fused(model)) if when == "before" else fused(sharded(model))
    for actual, wanted in zip(train(model), native, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert spy.count == count
