"""The fusion of a gated MLP with the norm before it: which pairs it finds, when it steps aside, that neither shows."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.patch import _glu_linear, _norm_mlp
from tigon.patch._deferred import Deferred

# Layers before which, and around which, there are norms; gelu; one packed tensor; factors; norms of heads.
FAMILIES = {
    "Llama": "post_attention_layernorm",
    "Gemma2": "pre_feedforward_layernorm",
    "Phi3": "post_attention_layernorm",
    "Granite": "post_attention_layernorm",
    "Qwen3": "post_attention_layernorm",
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


class Spy:
    def __init__(self) -> None:
        self.calls = 0

    @property
    def count(self) -> int:
        count, self.calls = self.calls, 0
        return count


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Calls of the operator."""
    seen, operator = Spy(), _norm_mlp.rms_norm_mlp

    def counted(*args: Any, **options: Any) -> Tensor:
        seen.calls += 1
        return operator(*args, **options)

    monkeypatch.setattr(_norm_mlp, "rms_norm_mlp", counted)
    monkeypatch.setattr(_glu_linear, "_noted", set())
    return seen


def fused(model: nn.Module, **options: Any) -> nn.Module:
    tigon.patch(model, fuse="rms_norm_mlp", **options)
    return model


def rows_of(report: Any, form: str = "rms_norm_mlp") -> list[tuple[str, str, str, int]]:
    return [(row.variant, row.verdict, row.reason, row.count) for row in report if row.form == form]


@EVERY
def test_training_is_as_without_and_the_operator_is_called(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build(family)
    native, keys = step(model, batch), list(model.state_dict())
    before = [dict(module.__dict__) for module in model.modules()]
    report = tigon.patch(model, fuse="rms_norm_mlp", strict=True)
    assert rows_of(report) == [(f"{FAMILIES[family]} + mlp", "replaced", "", 2)]
    assert_same_step(step(model, batch), native)
    assert spy.count == 2
    assert list(model.state_dict()) == keys
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("mlp", ["recompute", "tiled"])
def test_gate_and_up_are_made_again(
    mlp: str, build: Any, batch: Any, step: Any, assert_same_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_norm_mlp.MLP["tiled"], "max_rows", 5)
    operator, seen = _norm_mlp.rms_norm_mlp, []

    def noted(*args: Any, **options: Any) -> Tensor:
        seen.append({k: options[k] for k in ("recompute", "max_rows") if k in options})
        return operator(*args, **options)

    monkeypatch.setattr(_norm_mlp, "rms_norm_mlp", noted)
    model = build("Llama")
    native = step(model, batch)
    report = tigon.patch(model, mlp=mlp, strict=True)
    assert [row[:2] for row in rows_of(report)] == [(f"{FAMILIES['Llama']} + mlp, {mlp}", "replaced")]
    assert_same_step(step(model, batch), native)
    assert seen == [_norm_mlp.MLP[mlp]] * 2 != [{}] * 2
    # Kept by a call that does not say, and changed by one that does.
    for options, wanted in (({}, mlp), ({"mlp": "saved"}, "saved"), ({}, "saved")):
        seen.clear()
        report = tigon.patch(model, **options)
        assert (f", {mlp}" in str(report)) == (wanted == mlp)
        step(model, batch)
        assert seen == [_norm_mlp.MLP[wanted]] * 2


def test_what_an_mlp_is_to_keep_is_checked(build: Any) -> None:
    model = build("Llama")
    before = [dict(module.__dict__) for module in model.modules()]
    for wrong in ("titled", 4096, True):
        with pytest.raises(
            ValueError, match=f"patch: mlp: expected one of 'saved', 'recompute', 'tiled', got {wrong!r}"
        ):
            tigon.patch(model, mlp=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="patch_on_build: mlp: expected one of"):
        tigon.patch_on_build(type(model), mlp="titled")
    with pytest.raises(ValueError, match="patch: mlp: expected a model with a norm and an MLP that are fused"):
        tigon.patch(model, mlp="tiled", only="rms_norm")
    assert [dict(module.__dict__) for module in model.modules()] == before
    with tigon.patch_on_build(type(model), mlp="tiled"):
        assert ", tiled" in str(tigon.patch(build("Llama")))


def test_a_loss_curve_is_as_without(build: Any, batch: Any, spy: Spy) -> None:
    def curve(model: nn.Module) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    apart = build("Llama")
    tigon.patch(apart)
    wanted = curve(apart)
    assert wanted[0] > wanted[-1] + 0.1
    torch.testing.assert_close(curve(fused(build("Llama"))), wanted, rtol=1e-5, atol=1e-5)
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


@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_the_loss_in_16_bits_is_that_of_the_separate_operators(how: str, build: Any, batch: Any, step: Any, spy: Spy):
    model = build("Llama").to(torch.bfloat16 if how == "bf16" else torch.float32)
    tigon.patch(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        apart = step(model, batch)
        fused(model)
        together = step(model, batch)
    assert spy.count == 2
    assert torch.equal(together["loss"], apart["loss"])
    for name, want in apart["grads"].items():
        got = together["grads"][name]
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= 2**-6 * want.abs().max(), name


@pytest.mark.kernels
def test_the_kernels_keep_neither_norm_nor_product(build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy):
    model = build("Llama", num_hidden_layers=1)
    native = step(model, batch)

    def kept(width: int) -> int:
        """Tensors of one width that a step keeps for backward, each memory once."""
        seen: dict[int, Tensor] = {}

        def pack(t: Tensor) -> Tensor:
            if t.shape[-1:] == (width,) and t.numel() == width * batch["input_ids"].numel():
                seen[t.data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            assert_same_step(step(model, batch), native)
        return len(seen)

    tigon.patch(model)
    wide, narrow = kept(48), kept(32)
    fused(model)
    assert (kept(48), kept(32)) == (wide - 1, narrow - 1)
    assert spy.count == 2


def test_copies_use_their_own_weights(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Llama")
    loss = model(**batch).loss
    twin = copy.deepcopy(fused(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.count == 2


def test_the_fusions_asked_for_together(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Llama")
    report = tigon.patch(model, fuse=["glu_linear", "add_rms_norm", "rms_norm_mlp"])
    assert rows_of(report) == [("post_attention_layernorm + mlp", "replaced", "", 2)]
    assert rows_of(report, "add_rms_norm") == []
    again = tigon.patch(model, fuse=["rms_norm_mlp"])
    assert rows_of(again) == [("post_attention_layernorm + mlp", "replaced", "already patched", 2)]
    model(**batch)
    assert spy.count == 2
    with tigon.patch_on_build(type(model), fuse="rms_norm_mlp"):
        model = build("Llama")
    model(**batch)
    assert spy.count == 2
    model = build("Llama")
    tigon.patch(model, fuse="add_rms_norm")
    ((_, verdict, reason, _),) = rows_of(tigon.patch(model, fuse="rms_norm_mlp"))
    assert (verdict, reason) == ("kept", "its add_rms_norm is computed together since an earlier call")
    with pytest.raises(ValueError, match="glu_linear, rms_norm_mlp"):
        tigon.patch(model, fuse="rms_norm_glu")


# ---- stepping aside ----


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def adapted(layer: nn.Module) -> None:
    layer.mlp.up_proj.__class__ = Doubled


def parametrised(layer: nn.Module) -> None:
    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    nn.utils.parametrize.register_parametrization(layer.mlp.gate_proj, "weight", Half())


def hooked(name: str) -> Any:
    return lambda layer: layer.get_submodule(name).register_forward_hook(lambda module, args, y: y * 2)


def hooked_backward(name: str) -> Any:
    return lambda layer: layer.get_submodule(name).register_full_backward_hook(lambda module, dx, dy: (dx[0] / 2,))


CHANGES = {
    "subclass": (adapted, "its up_proj is a Doubled, not a plain nn.Linear"),
    "parametrised": (parametrised, "its gate_proj is a ParametrizedLinear, not a plain nn.Linear"),
    "projection": (hooked("mlp.gate_proj"), "its gate_proj has hooks"),
    "norm": (hooked("post_attention_layernorm"), "its post_attention_layernorm has hooks, or another forward since"),
    "mlp": (hooked("mlp"), "its mlp has hooks, or another forward since"),
    "norm backward": (hooked_backward("post_attention_layernorm"), "its post_attention_layernorm has hooks"),
    "mlp backward": (hooked_backward("mlp"), "its mlp has hooks"),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_does_more_is_called(
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
    function(native.model.layers[1])
    wanted = step(native, batch)
    if when == "after":
        fused(model)
    function(model.model.layers[1])
    if when == "before":
        fused(model)
    with caplog.at_level(logging.INFO, logger="tigon"):
        assert_same_step(step(model, batch), wanted)
    assert spy.count == 1
    if when == "after":
        assert [reason in record.message for record in caplog.records] == [True]
    kept = [row for row in rows_of(tigon.patch(model, fuse="rms_norm_mlp")) if row[1] == "kept"]
    assert [(reason in row[2], row[3]) for row in kept] == [(True, 1)]


def test_low_rank_adapters_train_as_without_patching(
    build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    peft = pytest.importorskip("peft")

    def with_adapters(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["layers.1.mlp.up_proj", "q_proj"])
        return peft.get_peft_model(model, config).train()

    native = step(with_adapters(build("Llama")), batch)
    assert_same_step(step(with_adapters(fused(build("Llama"))), batch), native)
    assert_same_step(step(fused(with_adapters(build("Llama"))), batch), native)
    assert spy.count == 2


def test_a_compiled_model_does_without(build: Any, batch: Any, spy: Spy) -> None:
    torch._dynamo.reset()
    model = build("Llama", num_hidden_layers=1)
    native = model(**batch).loss
    fused(model)
    loss = torch.compile(model, fullgraph=True, backend="eager")(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, native, rtol=1e-5, atol=1e-5)
    assert spy.count == 0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("Olmo2", "none of its norms goes straight into its mlp"),
        ("Mixtral", "none of its blocks is a gated MLP"),
    ],
)
def test_other_layers_are_kept(
    family: str, reason: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build(family)
    native = step(model, batch)
    assert rows_of(tigon.patch(model, fuse="rms_norm_mlp")) == [("", "kept", reason, 2)]
    assert_same_step(step(model, batch), native)
    assert spy.count == 0


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        n = x.float()
        return self.weight * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down, self.act = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mix, self.mlp = Norm(), Norm(), nn.Linear(16, 16), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Parallel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm1(x)
        return x + self.mix(n) + self.mlp(n)


class UsedTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        n = self.norm2(x)
        return n + self.mlp(n)


class Leaks(Layer):
    """When it is told to, which no trial sees."""

    def forward(self, x: Tensor, leak: Any = None) -> Any:
        n = self.norm2(x)
        y = x + self.mlp(n)
        return y if leak is None else (y, n, n * 2)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Layer, ""),
        (Leaks, ""),
        (Parallel, "what its norm1 gives is taken by mix too"),
        (UsedTwice, "what its norm2 gives is taken by it elsewhere too"),
    ],
)
def test_layers_compute_the_same(cls: Any, reason: str, spy: Spy) -> None:
    torch.manual_seed(0)
    layer, x, upstream = cls(), torch.randn(3, 4, 16), torch.randn(3, 4, 16)

    def run() -> list[Tensor | None]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(upstream)
        return [y, leaf.grad, *(p.grad for p in layer.parameters())]

    native = run()
    ((variant, verdict, why, _),) = rows_of(tigon.patch(layer, fuse="rms_norm_mlp"))
    assert (variant, verdict, why) == (("norm2 + mlp", "replaced", "") if not reason else ("", "kept", reason))
    for actual, wanted in zip(run(), native, strict=True):
        if wanted is None:
            assert actual is None
        else:
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert spy.count == (not reason)


def test_a_use_that_no_trial_saw_gets_the_norm(spy: Spy) -> None:
    torch.manual_seed(0)
    layer, x = Leaks(), torch.randn(3, 4, 16)

    def run() -> list[Tensor]:
        layer.zero_grad()
        results = layer(x, leak=True)
        assert not any(issubclass(type(each), Deferred) for each in results)
        sum(each.square().sum() for each in results).backward()
        return [*results, *(p.grad for p in (layer.norm2.weight, *layer.mlp.parameters()))]

    native = run()
    fused(layer)
    for actual, wanted in zip(run(), native, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert spy.count == 1


# Of the compiler, for an input that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("name", ["mlp", "norm2"])
def test_a_child_that_is_compiled_by_itself_is_given_tensors(name: str, spy: Spy) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(3, 4, 16)
    native = layer(x)
    fused(layer)
    layer.get_submodule(name).compile(fullgraph=True, backend="eager")
    torch.testing.assert_close(layer(x), native, rtol=1e-5, atol=1e-5)
    assert spy.count == 0
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("unit", "count"), [("layer", 4), ("mlp", 0), ("norm", 0), ("down", 0)])
def test_sharded_models_train_as_without_patching(
    unit: str, count: int, build: Any, batch: Any, spy: Spy, tmp_path: Path
) -> None:
    """A layer that is sharded as one unit is whole while it runs; a part of the pair by itself is not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))

        def sharded(model: nn.Module) -> nn.Module:
            for layer in model.model.layers:
                parts = {"mlp": layer.mlp, "norm": layer.post_attention_layernorm, "down": layer.mlp.down_proj}
                fully_shard(parts.get(unit, layer), mesh=mesh)
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
        for actual, wanted in zip(train(sharded(fused(build("Llama")))), native, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
        assert spy.count == count
    finally:
        torch.distributed.destroy_process_group()
