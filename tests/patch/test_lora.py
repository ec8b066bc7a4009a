"""Layers with low-rank adapters: when one operator computes both, when it steps aside, and that neither shows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.patch import _apply, _lora

peft = pytest.importorskip("peft")

# Of a tiny model with two layers: seven projections each, or four where gate and up, and queries, keys and values, are
# one.
LAYERS = {"Llama": 14, "Phi3": 8, "Gemma2": 14}


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
    seen, operator = Spy(), _lora.lora_linear
    monkeypatch.setattr(_lora, "lora_linear", lambda *a, **k: seen.calls.append(k) or operator(*a, **k))
    return seen


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(3)
    given = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, "target_modules": "all-linear", **options}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **given)).train()


def fused(model: nn.Module, **options: Any) -> nn.Module:
    tigon.patch(model, fuse="lora_linear", **options)
    return model


def rows_of(report: Any) -> list[tuple[str, str, int]]:
    return [(row.verdict, row.reason, row.count) for row in report if row.form == "lora_linear"]


def layer_of(model: nn.Module, name: str = "0.self_attn.q_proj") -> Any:
    return model.get_submodule(f"base_model.model.model.layers.{name}")


@pytest.fixture
def layer() -> Callable[..., nn.Module]:
    """One adapted layer within a module, patched unless `plain`."""

    def make(*, plain: bool = False, bias: bool = True, k: int = 24, n: int = 16, **options: Any) -> nn.Module:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(k, n, bias=bias))
        config = peft.LoraConfig(
            **{"r": 3, "lora_alpha": 4, "init_lora_weights": False, "target_modules": ["0"], **options}
        )
        wrapped = peft.get_peft_model(model, config).train()
        if not plain:
            report = tigon.patch(wrapped, fuse="lora_linear")
            assert rows_of(report) == [("replaced", "", 1)]
        return wrapped

    return make


def inner(model: nn.Module) -> Any:
    return model.base_model.model[0]


def assert_same_run(actual: nn.Module, expected: nn.Module, x: Tensor, **options: Any) -> None:
    runs = []
    for model in (actual, expected):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = model(given, **options)
        y.square().sum().backward()
        learned = {
            name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None
        }
        runs.append({"y": y.detach(), "x": given.grad, **learned})
    assert runs[0].keys() == runs[1].keys()
    for name, wanted in runs[1].items():
        assert runs[0][name].dtype == wanted.dtype
        torch.testing.assert_close(runs[0][name], wanted, rtol=1e-4, atol=1e-4)


# ---- on ----


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
@pytest.mark.parametrize("family", LAYERS)
def test_training_is_as_without_and_the_operator_is_called(
    family: str, options: dict[str, Any], build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = adapted(build(family), **options)
    native, keys = step(model, batch), list(model.state_dict())
    report = tigon.patch(model, fuse="lora_linear")
    assert rows_of(report) == [("replaced", "", LAYERS[family])]
    assert_same_step(step(model, batch), native)
    assert spy.count == LAYERS[family]
    assert list(model.state_dict()) == keys
    assert rows_of(tigon.patch(model)) == [("replaced", "already patched", LAYERS[family])]
    tigon.unpatch(model)
    assert_same_step(step(model, batch), native)
    assert spy.count == 0


def test_only_when_asked_for(build: Any) -> None:
    assert rows_of(tigon.patch(adapted(build("Llama")))) == []
    report = tigon.patch(adapted(build("Llama")), fuse="lora_linear", only=["*q_proj"])
    assert rows_of(report) == [("replaced", "", 2)]


def test_with_every_other_fusion(build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy) -> None:
    model = adapted(build("Llama"))
    native = step(model, batch)
    tigon.patch(model, fuse=("lora_linear", "glu_linear", "rms_norm_mlp", "qk_norm_rope"))
    assert_same_step(step(model, batch), native)
    assert spy.count == LAYERS["Llama"]


def test_the_output_layer_gives_real_logits(build: Any, batch: Any, step: Any, assert_same_step: Any) -> None:
    native = step(adapted(build("Llama"), target_modules=["lm_head", "q_proj"]), batch)
    for first in (False, True):
        model = build("Llama")
        if first:
            tigon.patch(model)
        assert_same_step(step(fused(adapted(model, target_modules=["lm_head", "q_proj"])), batch), native)


@pytest.mark.kernels
def test_kernels_train_as_plain_torch(layer: Any) -> None:
    x = torch.randn(2, 5, 24)
    assert (
        tigon.why_not(
            "lora_linear", x, *[p.detach() for p in (torch.ones(16, 24), torch.ones(3, 24), torch.ones(16, 3))]
        )
        == []
    )
    assert_same_run(layer(), layer(plain=True), x)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_dtypes_are_those_of_the_layer(adapter: torch.dtype, autocast: bool, layer: Any, spy: Spy) -> None:
    actual, expected = layer(), layer(plain=True)
    x = torch.randn(5, 24).bfloat16()
    for model in (actual, expected):
        base = inner(model).base_layer.bfloat16()
        assert base.weight.dtype == torch.bfloat16
        inner(model).lora_A.to(adapter)
        inner(model).lora_B.to(adapter)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, wanted = actual(x), expected(x)
    assert y.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(y, wanted, rtol=2**-7, atol=2**-7)
    y.sum().backward()
    assert all(p.grad.dtype == p.dtype == adapter for n, p in actual.named_parameters() if "lora" in n)
    assert spy.count == 1


# ---- dropout ----


def test_dropout_is_only_of_training_and_repeats(layer: Any, spy: Spy) -> None:
    model, plain, x = layer(lora_dropout=0.5), layer(lora_dropout=0.5, plain=True), torch.randn(40, 24)
    torch.manual_seed(1)
    first, second = model(x), model(x)
    torch.manual_seed(1)
    assert torch.equal(model(x), first)
    assert not torch.equal(first, second)
    assert [call["dropout"] for call in spy.calls] == [0.5] * 3
    assert_same_run(model.eval(), plain.eval(), x)
    # The mean over masks is what is computed without: here over many rows, which are all the same.
    model.train()
    rows = x[:1].expand(4096, -1)
    y = model(rows)
    error = (y.mean(0) - plain(x[:1])[0]).abs() / (y.std(0) / 64)
    assert float(error.detach().max()) < 5


def test_checkpointed_layers_drop_the_same_again(build: Any, batch: Any, step: Any, assert_same_step: Any) -> None:
    model = fused(adapted(build("Llama"), lora_dropout=0.3))
    torch.manual_seed(1)
    expected = step(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    torch.manual_seed(1)
    assert_same_step(step(model, batch), expected)


def test_no_mask_and_no_second_input_is_kept(layer: Any) -> None:
    def kept(model: nn.Module) -> int:
        found: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: found.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t
        ):
            model(x)
        return sum(found.values())

    x = torch.randn(64, 24, requires_grad=True)
    model = layer(lora_dropout=0.5)
    weights = sum(p.nbytes for p in model.parameters())
    # x, three numbers a row, a seed. Two tensors as large as x more in the layer's own forward.
    with tigon.backend("auto"):
        assert kept(model) <= x.nbytes + 64 * 3 * 4 + weights + 8
    assert kept(layer(lora_dropout=0.5, plain=True)) > 2 * x.nbytes


# ---- aside ----


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "its adapter is a DoraLinearVariant, not a plain product"),
        ({"lora_bias": True}, "its adapter has a bias"),
    ],
    ids=["dora", "bias"],
)
def test_what_the_operator_has_not_is_kept(options: dict[str, Any], reason: str, layer: Any, spy: Spy) -> None:
    model, plain = layer(plain=True, **options), layer(plain=True, **options)
    with pytest.warns(UserWarning, match="replaced nothing"):
        report = tigon.patch(model, fuse="lora_linear")
    assert rows_of(report) == [("kept", reason, 1)]
    assert_same_run(model, plain, torch.randn(5, 24))
    assert spy.count == 0
    with pytest.raises(ValueError, match=reason):
        tigon.patch(model, fuse="lora_linear", strict=True)


def _merge(model: Any) -> None:
    model.merge_adapter()


def _disable(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def _add_second(model: Any) -> None:
    model.add_adapter("second", peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["0"]))


def _both(model: Any) -> None:
    torch.manual_seed(9)
    _add_second(model)
    model.base_model.set_adapter(["default", "second"])


def _hook_on(name: str) -> Callable[[Any], None]:
    def hook(model: Any) -> None:
        child = inner(model)
        for part in name.split("."):
            child = getattr(child, part) if hasattr(child, part) else child[part]
        child.register_forward_hook(lambda module, args, output: 2 * output)

    return hook


def _prune(model: Any) -> None:
    from torch.nn.utils.parametrize import register_parametrization

    class Half(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    register_parametrization(inner(model).base_layer, "weight", Half())


ASIDE = {
    "merged": (_merge, "merged"),
    "disabled": (_disable, "disabled"),
    "two active": (_both, "2 of its adapters are active"),
    "hook on base": (_hook_on("base_layer"), "base layer has hooks"),
    "hook on lora_A": (_hook_on("lora_A.default"), "lora_A has hooks"),
    "hook on lora_B": (_hook_on("lora_B.default"), "lora_B has hooks"),
    "hook on dropout": (_hook_on("lora_dropout.default"), "dropout has hooks"),
    "parametrised": (_prune, "base layer is a ParametrizedLinear"),
}


@pytest.mark.parametrize("kind", ASIDE)
def test_what_came_after_patching_is_seen(kind: str, layer: Any, spy: Spy) -> None:
    change, reason = ASIDE[kind]
    model, plain, x = layer(), layer(plain=True), torch.randn(5, 24)
    change(model)
    change(plain)
    assert_same_run(model, plain, x)
    assert spy.count == 0
    with pytest.warns(UserWarning, match="replaced nothing"):
        ((verdict, why, _),) = rows_of(tigon.patch(model, fuse="lora_linear"))
    assert verdict == "kept"
    assert reason in why


def test_switching_adapters_is_followed(layer: Any, spy: Spy) -> None:
    model, plain, x = layer(), layer(plain=True), torch.randn(5, 24)
    for each in (model, plain):
        torch.manual_seed(9)
        _add_second(each)
        each.set_adapter("second")
    assert_same_run(model, plain, x)
    assert spy.count == 1
    with model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(x), plain(x))
    assert spy.count == 0
    for each in (model, plain):
        each.set_adapter("default")
        inner(each).set_scale("default", 3.0)
    assert_same_run(model, plain, x)
    assert spy.count == 1


def test_names_of_adapters_for_each_row_go_to_the_layer(layer: Any, spy: Spy) -> None:
    model, plain, x = layer(), layer(plain=True), torch.randn(2, 24)
    for each in (model.eval(), plain.eval()):
        torch.manual_seed(9)
        _add_second(each)
    names = ["second", "__base__"]
    assert torch.equal(inner(model)(x, adapter_names=names), inner(plain)(x, adapter_names=names))
    assert spy.count == 0


def test_a_layer_that_computes_something_else_is_refused(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(inner(layer(plain=True)))
    own = kind.forward
    formulas = {
        "doubled adapter": lambda self, x: 2 * own(self, x) - self.base_layer(x),
        "no dropout": lambda self, x: (
            self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        ),
        "shifted": lambda self, x: own(self, x) + 1,
        "no scaling": lambda self, x: own(self, x) / self.scaling["default"],
        "detached": lambda self, x: self.base_layer(x) + (own(self, x) - self.base_layer(x)).detach(),
    }
    for forward in formulas.values():
        model = layer(plain=True)
        monkeypatch.setattr(kind, "forward", forward)
        monkeypatch.setattr(_apply, "_verdicts", {})
        with pytest.warns(UserWarning, match="replaced nothing"):
            ((verdict, reason, _),) = rows_of(tigon.patch(model, fuse="lora_linear"))
        assert verdict == "kept"
        assert "computes something else" in reason or "gradient" in reason
        monkeypatch.setattr(kind, "forward", own)


def test_tensors_of_other_classes_go_to_the_layer(layer: Any, spy: Spy) -> None:
    class Wrapped(Tensor):
        pass

    model, x = layer(), torch.randn(5, 24)
    y = model(x.as_subclass(Wrapped))
    assert isinstance(y, Wrapped)
    assert spy.count == 0
    torch.testing.assert_close(y.as_subclass(Tensor), model(x))


# ---- what else is done with adapted models ----


def test_adapters_are_saved_loaded_and_merged(
    build: Any, batch: Any, step: Any, assert_same_step: Any, tmp_path: Path
) -> None:
    model = fused(adapted(build("Llama")))
    expected = step(model, batch)
    model.save_pretrained(tmp_path)
    again = fused(peft.PeftModel.from_pretrained(build("Llama"), tmp_path, is_trainable=True).train())
    assert_same_step(step(again, batch), expected)
    merged = model.merge_and_unload()
    assert not any("_tigon" in m.__dict__ and m._tigon.form == "lora_linear" for m in merged.modules())
    torch.testing.assert_close(merged(**batch).loss, expected["loss"], rtol=1e-5, atol=1e-5)


def test_copies_are_their_own(layer: Any, spy: Spy) -> None:
    model, x = layer(), torch.randn(5, 24)
    expected = model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    spy.calls.clear()
    assert torch.equal(other(x), expected)
    assert spy.count == 1
    assert torch.equal(pickle.loads(pickle.dumps(other))(x), expected)


def test_compiled_in_one_graph(layer: Any) -> None:
    torch._dynamo.reset()
    model, plain, x = layer(lora_dropout=0.0), layer(plain=True), torch.randn(5, 24)
    assert_same_run(torch.compile(model, fullgraph=True, backend="aot_eager"), plain, x)
    torch._dynamo.reset()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("unit", "count"), [("layer", 14), ("base_layer", 12), ("lora_A", 12)])
def test_sharded_models_train_as_without_patching(
    unit: str, count: int, build: Any, batch: Any, spy: Spy, process_group: None
) -> None:
    """What is sharded as a unit of its own is not whole outside of it; what is sharded with a whole layer is."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def sharded(model: nn.Module) -> nn.Module:
        for index in range(2):
            if unit != "layer":
                child = getattr(layer_of(model, f"{index}.mlp.down_proj"), unit)
                fully_shard(child["default"] if unit == "lora_A" else child, mesh=mesh)
            fully_shard(layer_of(model, str(index)), mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def train(model: nn.Module) -> list[Tensor]:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.full_tensor().detach() for p in model.parameters() if p.requires_grad]

    native = train(sharded(adapted(build("Llama"))))
    for actual, wanted in zip(train(sharded(fused(adapted(build("Llama"))))), native, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert spy.count == 2 * count


# ---- bases of 4 bits ----


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes")


def in_4_bits(model: nn.Module, nested: bool, compute_dtype: torch.dtype = torch.float32) -> nn.Module:
    import bitsandbytes

    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and "lm_head" not in name:
            parent, _, child = name.rpartition(".")
            options = {"compute_dtype": compute_dtype, "quant_type": "nf4", "compress_statistics": nested}
            sizes = module.in_features, module.out_features, module.bias is not None
            made = bitsandbytes.nn.Linear4bit(*sizes, **options)
            made.load_state_dict(module.state_dict())
            # This is when it is packed.
            setattr(model.get_submodule(parent), child, made.to("cpu"))
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


# Rows of a multiple of the 64 numbers of a block: of others its own forward on a CPU takes the wrong scales.
SIZES = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def nf4_spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, operator = Spy(), _lora.nf4_lora_linear
    monkeypatch.setattr(_lora, "nf4_lora_linear", lambda *a, **k: seen.calls.append(k) or operator(*a, **k))
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_4_bit_models_train_as_without_patching(
    family: str, nested: bool, build: Any, batch: Any, step: Any, assert_same_step: Any, bitsandbytes: Any, nf4_spy: Spy
) -> None:
    model = adapted(in_4_bits(build(family, **SIZES), nested))
    native = step(model, batch)
    report = tigon.patch(model, fuse="lora_linear")
    assert [(row.variant, row.verdict) for row in report if row.form == "lora_linear"] == [
        ("adapter of 4 bits", "replaced")
    ]
    assert_same_step(step(model, batch), native)
    assert nf4_spy.count == LAYERS[family]
    tigon.unpatch(model)
    assert_same_step(step(model, batch), native)


@pytest.fixture
def layer_4_bit(bitsandbytes: Any) -> Callable[..., nn.Module]:
    def make(*, plain: bool = False, compute_dtype: torch.dtype = torch.float32, nested: bool = True) -> nn.Module:
        torch.manual_seed(4)
        model = in_4_bits(nn.Sequential(nn.Linear(64, 48)), nested, compute_dtype)
        config = peft.LoraConfig(r=3, lora_alpha=4, init_lora_weights=False, target_modules=["0"])
        wrapped = peft.get_peft_model(model, config).train()
        if not plain:
            assert rows_of(tigon.patch(wrapped, fuse="lora_linear")) == [("replaced", "", 1)]
        return wrapped

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.kernels
def test_4_bit_kernels_train_as_plain_torch(layer_4_bit: Any, nf4_spy: Spy) -> None:
    for nested in (False, True):
        model, plain = layer_4_bit(nested=nested), layer_4_bit(nested=nested, plain=True)
        assert_same_run(model, plain, torch.randn(2, 5, 64))
    assert nf4_spy.count == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_4_bit_layers_that_compute_in_16_bits(
    x_dtype: torch.dtype, autocast: bool, layer_4_bit: Any, nf4_spy: Spy
) -> None:
    """As after preparing a model for training: an fp32 stream, a product in bf16, an fp32 adapter."""
    actual, expected = (layer_4_bit(compute_dtype=torch.bfloat16, plain=plain) for plain in (False, True))
    x = torch.randn(5, 64).to(x_dtype)
    runs = []
    for model in (actual, expected):
        given = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(given)
        y.float().square().sum().backward()
        runs.append((y, given.grad, *(p.grad for n, p in model.named_parameters() if "lora" in n)))
    for got, wanted in zip(*runs, strict=True):
        assert got.dtype == wanted.dtype
        # A few roundings to 8 bits of what is as large as the largest.
        assert float((got - wanted).abs().max()) <= 2**-6 * float(wanted.abs().max())
    assert [call["compute_dtype"] for call in nf4_spy.calls] == [torch.bfloat16]


@pytest.mark.filterwarnings("ignore")
def test_4_bit_layers_step_aside(layer_4_bit: Any, nf4_spy: Spy) -> None:
    def hooked(model: nn.Module) -> None:
        inner(model).base_layer.register_forward_hook(lambda module, args, output: 2 * output)

    def undecided(model: nn.Module) -> None:
        inner(model).base_layer.compute_type_is_set = False

    for change in (_merge, _disable, hooked, undecided):
        model, plain, x = layer_4_bit(), layer_4_bit(plain=True), torch.randn(5, 64)
        change(model)
        change(plain)
        assert_same_run(model, plain, x)
        assert nf4_spy.count == 0
    # Another forward than the one that was run against the operator.
    with pytest.MonkeyPatch.context() as patch:
        model, kind = layer_4_bit(), type(inner(layer_4_bit()).base_layer)
        own = kind.forward
        patch.setattr(kind, "forward", lambda self, x: 3 * own(self, x))
        model(x)
    assert nf4_spy.count == 0
    # Without kernels the layer's own forward keeps less.
    with tigon.backend("auto"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_lora, "why_no_kernels", lambda *_: ["of a test"])
        layer_4_bit()(torch.randn(5, 64))
    assert nf4_spy.count == 0


@pytest.mark.filterwarnings("ignore")
def test_a_4_bit_base_that_computes_something_else_is_refused(
    layer_4_bit: Any, bitsandbytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = bitsandbytes.nn.Linear4bit.forward
    monkeypatch.setattr(bitsandbytes.nn.Linear4bit, "forward", lambda self, x: own(self, x) * 1.01)
    monkeypatch.setattr(_apply, "_verdicts", {})
    ((verdict, reason, _),) = rows_of(tigon.patch(layer_4_bit(plain=True), fuse="lora_linear"))
    assert verdict == "kept"
    assert "computes something else" in reason


@pytest.mark.filterwarnings("ignore")
@pytest.mark.kernels
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_4_bit_layers_compile_in_one_graph(backend: str, layer_4_bit: Any) -> None:
    torch._dynamo.reset()
    model, plain, x = layer_4_bit(), layer_4_bit(plain=True), torch.randn(5, 64)
    with tigon.backend(backend):
        assert_same_run(model, plain, x)
        assert_same_run(torch.compile(model, fullgraph=True, backend="aot_eager"), plain, x)
    torch._dynamo.reset()
