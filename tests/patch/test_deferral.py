"""What is not computed yet must be what it would have been: its gradient, its mode, its memory, its type."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections import UserDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.patch import _head, _swap
from tigon.patch._head import DeferredLogits

LlamaForCausalLM = pytest.importorskip("transformers").LlamaForCausalLM


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.pow(2).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad / x.numel()


def mean_square(x: Any) -> torch.Tensor:
    return x.pow(2).mean()


def helper(x: Any) -> torch.Tensor:
    return Squares.apply(x)


def ce(logits: Any, labels: Any) -> torch.Tensor:
    return F.cross_entropy(logits.reshape(-1, 61), labels.reshape(-1))


def model_of(build: Any, compute: Any, **options: Any) -> nn.Module:
    """A language model whose loss is `compute(model, hidden, labels)`."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        # Named, so that it is one with a loss to replace.
        F.cross_entropy  # noqa: B018
        return CausalLMOutput(loss=compute(self, self.model(input_ids).last_hidden_state, labels))

    model = build("Llama", num_hidden_layers=1, **options)
    model.__class__ = type("Custom", (LlamaForCausalLM,), {"forward": forward})
    return model


def compare(model: nn.Module, batch: Any, step: Any, assert_same_step: Any, *, kept: str = "") -> nn.Module:
    """A step before and after patching; `kept` is why the loss is, `""` if it is replaced."""
    want = step(copy.deepcopy(model), batch)
    row = next(row for row in tigon.patch(model, only=["linear_cross_entropy", "rms_norm"]) if row.cls == "Custom")
    assert row.verdict == ("kept" if kept else "replaced")
    assert kept in row.reason
    assert_same_step(step(model, batch), want)
    return model


# ---- past the dispatch ----

PAST = {
    "autograd function": (lambda self, z: Squares.apply(z), "apply in"),
    "in a helper": (lambda self, z: helper(z), "apply in helper"),
    "re-entrant checkpoint": (lambda self, z: checkpoint(mean_square, z, use_reentrant=True), "checkpoint in"),
}


@pytest.mark.parametrize("name", PAST)
def test_logits_for_what_does_not_dispatch_are_real(
    name: str, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    use, reason = PAST[name]

    def compute(self: Any, hidden: Any, labels: Any) -> Any:
        logits = self.lm_head(hidden)
        return ce(logits, labels) + use(self, logits)

    model = model_of(build, compute)
    compare(model, batch, step, assert_same_step, kept=reason)


def test_a_loss_function_set_later_that_does_not_dispatch_gets_real_logits(
    build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return ce(logits, labels) + helper(logits)

    native = build("Llama", num_hidden_layers=1)
    model = copy.deepcopy(native)
    tigon.patch(model)
    for each in (native, model):
        each.loss_function = loss
    assert_same_step(step(model, batch), step(native, batch))


def test_what_was_not_seen_before_raises(build: Any, batch: Any) -> None:
    hidden = {"it": Squares}

    def loss(logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return getattr(hidden["it"], "app" + "ly")(logits)

    model = build("Llama", num_hidden_layers=1)
    tigon.patch(model)
    model.loss_function = loss
    with pytest.raises(RuntimeError, match="an autograd function, or a re-entrant checkpoint, got DeferredLogits"):
        model(**batch)


# ---- as it was when the output layer was called ----


def without_gradients(self: Any, hidden: Any, labels: Any) -> Any:
    with torch.no_grad():
        teacher = self.lm_head(hidden)
    return ce(self.lm_head(hidden), labels) + 0.3 * ce(teacher, labels)


def a_view_without_gradients(self: Any, hidden: Any, labels: Any) -> Any:
    logits = self.lm_head(hidden)
    with torch.no_grad():
        part, half = logits[:, 1:], logits / 2
    return ce(logits, labels) + mean_square(part) + ce(half, labels)


def with_a_frozen_weight(self: Any, hidden: Any, labels: Any) -> Any:
    self.lm_head.weight.requires_grad_(False)
    logits = self.lm_head(hidden)
    self.lm_head.weight.requires_grad_(True)
    return ce(logits, labels) + 0 * self.lm_head.weight.sum()


def with_a_weight_frozen_later(self: Any, hidden: Any, labels: Any) -> Any:
    logits = self.lm_head(hidden)
    self.lm_head.weight.requires_grad_(False)
    loss = ce(logits, labels)
    self.lm_head.weight.requires_grad_(True)
    return loss


def an_edit_after_a_copy(self: Any, hidden: Any, labels: Any) -> Any:
    logits = self.lm_head(hidden)
    part = logits[:, :-1].reshape(-1, 61)
    logits.mul_(0.1)
    return F.cross_entropy(part, labels[:, 1:].reshape(-1)) + ce(logits, labels)


def an_edit_after_a_view(self: Any, hidden: Any, labels: Any) -> Any:
    logits = self.lm_head(hidden)
    part, same = logits[:1, 2:].reshape(-1, 61), logits[:, :].contiguous()
    logits.mul_(0.1)
    return F.cross_entropy(part, labels[:1, 2:].reshape(-1)) + ce(same, labels)


def asks_for_its_type(self: Any, hidden: Any, labels: Any) -> Any:
    logits = self.lm_head(hidden)
    extra = mean_square(logits) if isinstance(logits, torch.Tensor) and torch.is_tensor(logits) else 0
    return ce(logits, labels) + extra


SAME = [
    without_gradients,
    a_view_without_gradients,
    with_a_frozen_weight,
    with_a_weight_frozen_later,
    an_edit_after_a_copy,
    an_edit_after_a_view,
    asks_for_its_type,
]


@pytest.mark.parametrize("compute", SAME, ids=lambda compute: compute.__name__)
def test_it_trains_as_if_the_logits_were_computed_at_once(
    compute: Any, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    model = compare(model_of(build, compute), batch, step, assert_same_step)
    assert model.lm_head.weight.requires_grad


def test_logits_made_without_autocast_are_not_rounded_by_it(build: Any, batch: Any) -> None:
    def compute(self: Any, hidden: Any, labels: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            logits = self.lm_head(hidden.float())
        return ce(logits, labels) + mean_square(logits)

    model = model_of(build, compute)
    native = copy.deepcopy(model)
    tigon.patch(model, only=["linear_cross_entropy"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(model(**batch).loss, native(**batch).loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("what", ["hidden states", "weight"])
@pytest.mark.parametrize("use", [ce, lambda logits, labels: mean_square(logits), lambda z, y: ce(z[:, 1:], y[:, 1:])])
def test_a_product_of_what_was_overwritten_since_raises(what: str, use: Any, build: Any, batch: Any) -> None:
    def compute(self: Any, hidden: Any, labels: Any) -> Any:
        hidden = hidden.clone()
        logits = self.lm_head(hidden)
        with torch.no_grad():
            (hidden if what == "hidden states" else self.lm_head.weight).mul_(0.5)
        return use(logits, labels) + 0 * F.cross_entropy(hidden[0], labels[0] * 0)

    model = model_of(build, compute)
    tigon.patch(model)
    with pytest.raises(RuntimeError, match=f"{what}.* modified by an inplace operation"):
        model(**batch)


# ---- calls from within calls, hooks, and what leaves the model ----


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_from_a_hook_gets_tensors_and_the_outer_call_stays_fused(
    grad: bool, build: Any, batch: Any, step: Any, assert_same_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    native, fused = build("Llama", num_hidden_layers=1), []
    model = copy.deepcopy(native)
    tigon.patch(model)
    inner = _head.linear_cross_entropy
    monkeypatch.setattr(_head, "linear_cross_entropy", lambda *a, **k: fused.append(1) or inner(*a, **k))
    seen: list[Any] = []

    def watched(model: nn.Module) -> Any:
        calls: list[Any] = []

        def hook(*_: Any) -> None:
            if not calls:
                calls.append(None)
                with torch.set_grad_enabled(grad):
                    seen.append(model(batch["input_ids"]).logits)

        handle = model.model.norm.register_forward_hook(hook)
        try:
            return step(model, batch)
        finally:
            handle.remove()

    assert_same_step(watched(model), watched(native))
    assert [type(each) for each in seen] == [torch.Tensor] * 2
    assert seen[0].requires_grad == grad
    assert fused == [1]
    assert not isinstance(model.lm_head(torch.zeros(1, 32)), DeferredLogits)


def test_hooks_on_all_modules_see_the_output_layer_once_with_logits(build: Any, batch: Any, step: Any) -> None:
    native = build("Llama", num_hidden_layers=1)
    model, seen = copy.deepcopy(native), []
    tigon.patch(model, only=["linear_cross_entropy"])

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(module, nn.Linear) and module.out_features == 61:
            seen.append(type(output))
            return output * 0.5
        return None

    handle = register_module_forward_hook(hook)
    try:
        losses = [step(each, batch)["loss"] for each in (model, native)]
    finally:
        handle.remove()
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert seen == [torch.Tensor] * 2


Pair = namedtuple("Pair", ["loss", "logits"])


@dataclasses.dataclass(frozen=True)
class Output:
    loss: Any
    logits: Any


class Fields(dict):
    pass


@pytest.mark.parametrize(
    "put",
    [
        Pair,
        Output,
        lambda loss, logits: types.SimpleNamespace(loss=loss, logits=logits),
        lambda loss, logits: UserDict(loss=loss, logits=logits),
        lambda loss, logits: Fields(loss=loss, logits=logits),
        lambda loss, logits: {"loss": loss, "logits": (Pair(loss, [logits]),)},
    ],
)
def test_nothing_deferred_leaves_in_any_container(put: Any, build: Any, batch: Any) -> None:
    def forward(self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return put(F.cross_entropy(logits.view(-1, 61), labels.view(-1)), logits)

    model = build("Llama", num_hidden_layers=1)
    model.__class__ = type("Custom", (LlamaForCausalLM,), {"forward": forward})
    tigon.patch(model, only=["linear_cross_entropy"])
    output = model(**batch)
    found: list[Any] = []

    def walk(value: Any) -> None:
        found.append(type(value))
        if isinstance(value, (tuple, list)):
            for each in value:
                walk(each)
        elif isinstance(value, (dict, UserDict)):
            walk(list(value.values()))
        elif not isinstance(value, torch.Tensor) and hasattr(value, "__dict__"):
            walk(vars(value))

    walk(output)
    assert DeferredLogits not in found
    assert torch.Tensor in found
    assert type(None) in found


def test_a_patch_that_fails_leaves_an_earlier_one_in_force(
    build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Qwen3")
    tigon.patch(model)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    install, calls = _swap.install, []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("boom")
        install(*args)

    monkeypatch.setattr(_swap, "install", failing)
    with pytest.raises(RuntimeError, match="boom"):
        tigon.patch(model, fuse=["qk_norm_rope"])
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys()
        assert module.__dict__.get("_tigon") == before[name].get("_tigon")
        assert module.__dict__.get("forward") == before[name].get("forward")
