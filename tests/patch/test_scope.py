"""What patching touches, what survives it, and how it is undone."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tigon
from tigon.patch import _apply, _swap

FORMS = ("rms_norm", "layer_norm", "glu", "rope", "linear_cross_entropy")


def changed(model: nn.Module) -> set[str]:
    """Names of the modules whose instance has a forward of its own."""
    return {name for name, module in model.named_modules() if "forward" in module.__dict__}


def test_b108_other_models_classes_and_modules_stay_as_they_are(build: Any, batch: Any) -> None:
    import transformers.models.llama.modeling_llama as modeling

    other, model = build("Llama"), build("Llama")
    classes = {type(module) for module in model.modules()}
    before = {cls: dict(vars(cls)) for cls in classes}
    namespace = dict(vars(modeling))
    torch_functions = dict(vars(torch.nn.functional))
    native = other(**batch)
    tigon.patch(model)
    assert all(dict(vars(cls)) == before[cls] for cls in classes)
    assert dict(vars(modeling)) == namespace
    assert dict(vars(torch.nn.functional)) == torch_functions
    assert changed(other) == set()
    for untouched in (other, build("Llama")):
        output = untouched(**batch)
        torch.testing.assert_close(output.logits, native.logits, rtol=0, atol=0)
        assert untouched.loss_function is not model.loss_function


def test_b110_repr_deepcopy_pickle_and_saving_work(build: Any, batch: Any, tmp_path: Path) -> None:
    model = build("Qwen2")
    text, keys = repr(model), list(model.state_dict())
    loss = model(**batch).loss
    tigon.patch(model)
    assert repr(model) == text
    assert list(model.state_dict()) == keys

    twin = copy.deepcopy(model)
    assert changed(twin) == changed(model)
    for name, module in twin.named_modules():
        if "forward" in module.__dict__:
            assert module.forward.__self__ is module, name

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [twin, pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    model.save_pretrained(tmp_path)
    copies.append(type(model).from_pretrained(tmp_path).train())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for each in copies:
        torch.testing.assert_close(each(**batch).loss, loss, rtol=1e-5, atol=1e-5)


def test_a_pickled_model_comes_back_native_and_can_be_patched_again(build: Any, batch: Any) -> None:
    model = build("Llama")
    tigon.patch(model)
    loaded = pickle.loads(pickle.dumps(model))
    assert loaded(**batch).logits is not None
    report = tigon.patch(loaded, strict=True)
    assert "already patched" not in str(report)
    assert loaded(**batch).logits is None
    tigon.unpatch(loaded)
    assert loaded(**batch).logits is not None


def test_patching_twice_is_patching_once(build: Any, batch: Any, step: Any, assert_same_step: Any) -> None:
    model = build("Llama")
    native = step(model, batch)
    first = tigon.patch(model)
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    second = tigon.patch(model)
    assert forwards == {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    assert {row.reason for row in second} == {"already patched"}
    assert [(row.form, row.count) for row in second] == [(row.form, row.count) for row in first]
    assert_same_step(step(model, batch), native)
    tigon.unpatch(model)
    assert changed(model) == set()
    tigon.unpatch(model)


def test_a_failure_midway_leaves_the_model_as_it_was(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, installs = build("Llama"), []
    before = [dict(module.__dict__) for module in model.modules()]

    def failing(*args: Any) -> None:
        installs.append(args)
        if len(installs) == 7:
            raise RuntimeError("on purpose")
        install(*args)

    install = _swap.install
    monkeypatch.setattr(_swap, "install", failing)
    with pytest.raises(RuntimeError, match="on purpose"):
        tigon.patch(model)
    assert len(installs) == 7
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("form", [form for form in FORMS if form != "layer_norm"])
def test_b114_every_form_can_be_chosen_and_skipped(form: str, build: Any) -> None:
    every = build("Llama")
    tigon.patch(every)
    chosen, skipped = build("Llama"), build("Llama")
    assert {row.form for row in tigon.patch(chosen, only=[form])} == {form}
    assert form not in {row.form for row in tigon.patch(skipped, skip=[form])}
    assert changed(chosen)
    assert changed(chosen) | changed(skipped) == changed(every)
    assert changed(chosen) & changed(skipped) == set()


def test_modules_can_be_chosen_and_skipped_by_name(build: Any) -> None:
    model = build("Llama")
    tigon.patch(model, only=["model.layers.0.*", "rms_norm"])
    assert changed(model) == {"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"}
    model = build("Llama")
    tigon.patch(model, skip=["model.layers.*", "lm_head"])
    assert changed(model) == {"model.norm"}


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_unknown_names_are_errors_that_list_the_forms(argument: str, build: Any) -> None:
    for wrong in (["swiglu_mlp"], ["model.layers.9.*"], "rmsnorm", [3]):
        with pytest.raises(ValueError, match=r"rms_norm, .*layer_norm, glu, experts, rope, linear_cross_entropy"):
            tigon.patch(build("Llama"), **{argument: wrong})


@pytest.mark.parametrize("thing", [None, "model", torch.zeros(3), nn.Module])
def test_things_that_are_no_modules_are_errors(thing: Any) -> None:
    for function in (tigon.patch, tigon.unpatch):
        with pytest.raises(ValueError, match=r"expected a torch.nn.Module"):
            function(thing)


def test_b116_nothing_recognised_is_a_warning_with_the_report() -> None:
    with pytest.warns(UserWarning, match="replaced nothing") as caught:
        report = tigon.patch(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    assert "Sequential: nothing recognised" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert (report.rows, len(report)) == ([], 0)


def test_strict_raises_with_the_table_and_changes_nothing(build: Any) -> None:
    model = build("Gemma2", hidden_activation="gelu_10")
    with pytest.raises(ValueError, match=r"(?s)strict.*Gemma2MLP x 2 +glu +kept +no candidate") as caught:
        tigon.patch(model, strict=True)
    assert "replaced" in str(caught.value)
    assert changed(model) == set()
    tigon.patch(model, strict=True, skip=["glu"])


def test_a_forward_that_was_replaced_already_is_not_replaced_again(build: Any, batch: Any) -> None:
    model = build("Llama")
    mlp, norm = model.model.layers[0].mlp, model.model.norm

    def own(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return type(self).forward(self, x) * 2

    mlp.forward = types.MethodType(own, mlp)
    norm.forward = types.MethodType(own, norm)
    before = dict(mlp.__dict__)
    loss = model(**batch).loss
    report = tigon.patch(model)
    assert {row.modules for row in report.kept} == {("model.layers.0.mlp",), ("model.norm",)}
    assert {row.reason for row in report.kept} == {"its forward was replaced on the instance already"}
    assert dict(mlp.__dict__) == before
    torch.testing.assert_close(model(**batch).loss, loss, rtol=1e-5, atol=1e-5)


def test_an_earlier_instance_forward_is_put_back(build: Any) -> None:
    """The class's own forward, bound on the instance, as a pickle leaves it."""
    norm = build("Llama").model.norm
    norm.forward = norm.forward
    earlier = norm.__dict__["forward"]
    tigon.patch(norm)
    assert norm.__dict__["forward"] is not earlier
    tigon.unpatch(norm)
    assert norm.__dict__["forward"] is earlier


def test_a_forward_wrapped_after_patching_stays_with_a_warning(build: Any, batch: Any) -> None:
    model = build("Llama")
    tigon.patch(model)
    inner = model.model.norm.forward
    model.model.norm.forward = lambda x: inner(x)
    with pytest.warns(UserWarning, match=r"model\.norm was wrapped after patching"):
        tigon.unpatch(model)
    assert changed(model) == {"model.norm"}
    assert model(**batch).logits is not None
    model.model.norm.forward = inner
    tigon.unpatch(model)
    assert changed(model) == set()


def test_replicas_of_data_parallel_use_their_own_weights(build: Any) -> None:
    model = build("Llama")
    tigon.patch(model)
    for module in (model, model.lm_head, model.model.norm, model.model.layers[0].mlp, model.model.layers[0].self_attn):
        replica = module._replicate_for_data_parallel()
        assert replica.forward.__self__ is replica
        assert replica.forward.__func__ is module.forward.__func__


def test_memory_of_verdicts_does_not_keep_models_alive(build: Any) -> None:
    import gc
    import weakref

    model = build("Llama")
    tigon.patch(model)
    remembered = weakref.ref(model.model.layers[0].mlp)
    del model
    gc.collect()
    assert remembered() is None
    assert _apply._verdicts


PROGRAM = """
import inspect, sys
import tigon
assert "transformers" not in sys.modules and "tigon.patch._apply" not in sys.modules
import torch
from torch import nn
{imports}
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6
    def forward(self, x):
        n = x.float()
        return self.weight * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
report = tigon.patch(Norm())
assert isinstance(report, tigon.Report)
assert report.rows[0].verdict == "replaced", str(report)
assert "transformers" not in sys.modules
assert str(inspect.signature(tigon.patch)).startswith("(model: 'nn.Module', *, only")
"""


def run_program(imports: str = "", **variables: str) -> str:
    """What the program writes to stderr."""
    quiet = {key: value for key, value in os.environ.items() if not key.endswith("_DEBUG")}
    command = [sys.executable, "-c", PROGRAM.format(imports=imports)]
    result = subprocess.run(command, capture_output=True, text=True, env={**quiet, **variables}, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stderr


@pytest.mark.parametrize("imports", ["", "import tigon.patch", "from tigon.patch import patch, Report"])
def test_patch_is_lazy_needs_no_transformers_and_is_callable_however_it_was_imported(imports: str) -> None:
    assert "rms_norm" not in run_program(imports)


@pytest.mark.parametrize("variable", ["TIGON_DEBUG", "LIGER_KERNEL_DEBUG"])
def test_debug_shows_the_table_without_logging_being_configured(variable: str) -> None:
    assert "Norm x 1  rms_norm" in run_program(**{variable: "1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": 3}, "only: expected names"),
        ({"only": []}, "only: expected at least one"),
        ({"skip": 3}, "skip: expected"),
    ],
)
def test_choices_that_are_none_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tigon.patch(nn.Linear(2, 2), **options)


def test_strict_raises_where_nothing_is_recognised() -> None:
    with pytest.raises(ValueError, match="strict: expected something to replace"):
        tigon.patch(nn.Linear(2, 2), strict=True)
