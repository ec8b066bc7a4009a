"""Fusions across modules: what is computed together, that nothing else changes, and when they stay off."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, apply_rotary_pos_emb, eager_attention_forward

import tigon
from tigon.patch import _add_norm, _norms, _rope
from tigon.patch._deferred import Deferred
from tigon.patch._stream import Stream

FUSIONS = ("add_rms_norm", "qk_norm_rope")
# Families with the norms that add, and whether queries and keys are normalised.
FAMILIES = {
    "Llama": ("post_attention_layernorm", False),
    "Mistral": ("post_attention_layernorm", False),
    "Qwen3": ("post_attention_layernorm", True),
    "Gemma2": ("pre_feedforward_layernorm", False),
    "Gemma3": ("pre_feedforward_layernorm", True),
    # The sum goes to the MLP, and the norms stand before the additions.
    "Olmo2": ("", False),
}
OPTIONS: dict[str, dict[str, Any]] = {"Gemma3": {"head_dim": 8, "sliding_window": 4}}
EVERY = pytest.mark.parametrize("family", FAMILIES)


class Spy:
    """How often a norm added, and a rotation normalised."""

    def __init__(self) -> None:
        self.added = self.normed = 0

    @property
    def counts(self) -> tuple[int, int]:
        counts, self.added, self.normed = (self.added, self.normed), 0, 0
        return counts


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, norm, together = Spy(), _norms.rms_norm, _rope.qk_norm_rope

    def counted_norm(*args: Any, residual: Any = None, **kwargs: Any) -> Any:
        seen.added += residual is not None
        return norm(*args, residual=residual, **kwargs)

    def counted_together(*args: Any, **kwargs: Any) -> Any:
        seen.normed += 1
        return together(*args, **kwargs)

    monkeypatch.setattr(_norms, "rms_norm", counted_norm)
    monkeypatch.setattr(_rope, "qk_norm_rope", counted_together)
    return seen


def expected(family: str, layers: int = 2) -> tuple[int, int]:
    norm, rotates = FAMILIES[family]
    return layers * bool(norm), layers * rotates


def make(build: Any, family: str, **options: Any) -> nn.Module:
    return build(family, **OPTIONS.get(family, {}), **options)


def fused(model: nn.Module, **options: Any) -> nn.Module:
    tigon.patch(model, fuse=FUSIONS, **options)
    return model


@EVERY
def test_training_is_as_without_and_the_operators_are_called(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = make(build, family)
    native, keys = step(model, batch), list(model.state_dict())
    before = [dict(module.__dict__) for module in model.modules()]
    report = tigon.patch(model, fuse=FUSIONS)
    rows = {row.form: row for row in report if row.form in FUSIONS}
    norm, rotates = FAMILIES[family]
    assert (rows["add_rms_norm"].verdict, rows["add_rms_norm"].count) == ("replaced" if norm else "kept", 2)
    assert rows["add_rms_norm"].variant == norm
    assert bool(rows["add_rms_norm"].reason) == (not norm)
    if rotates:
        assert (rows["qk_norm_rope"].verdict, rows["qk_norm_rope"].variant) == ("replaced", "q_norm, k_norm")
    spy.counts  # noqa: B018
    assert_same_step(step(model, batch), native)
    assert spy.counts == expected(family)
    assert list(model.state_dict()) == keys
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


@EVERY
def test_generation_and_hidden_states_are_as_without(family: str, build: Any, batch: Any, spy: Spy) -> None:
    model = make(build, family).eval()
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(batch["input_ids"])}
    tokens = model.generate(batch["input_ids"], **options)
    native = model(**batch, output_hidden_states=True)
    fused(model)
    assert torch.equal(model.generate(batch["input_ids"], **options), tokens)
    assert spy.counts == tuple(6 * count for count in expected(family))
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
    torch.testing.assert_close(output.logits, native.logits, rtol=1e-4, atol=1e-4)
    assert len(output.hidden_states) == 3
    for actual, wanted in zip(output.hidden_states, native.hidden_states, strict=True):
        assert type(actual) is Tensor
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@EVERY
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(
    family: str, use_reentrant: bool, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = make(build, family)
    native = step(model, batch)
    fused(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_same_step(step(model, batch), native)
    # Forward, and again in backward.
    assert spy.counts == tuple(2 * count for count in expected(family))


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3"])
def test_autocast_and_bf16_round_as_the_separate_operators_do(
    family: str, build: Any, batch: Any, step: Any, spy: Spy
) -> None:
    """No further from the fp32 gradients than the same model without the fusions."""
    for dtype in (torch.float32, torch.bfloat16):
        model = make(build, family)
        exact = step(model, batch)["grads"]
        model = model.to(dtype)
        context = torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32)
        tigon.patch(model)
        with context:
            apart = step(model, batch)["grads"]
        fused(model)
        with context:
            together = step(model, batch)["grads"]
        assert spy.counts == expected(family)
        for name, want in exact.items():
            assert together[name].dtype == apart[name].dtype == dtype
            error, own = ((each[name].float() - want).square().mean().sqrt() for each in (together, apart))
            assert error <= 1.5 * own + 1e-6 * want.abs().max(), name


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_copies_and_pickles_use_their_own_weights(family: str, build: Any, batch: Any, spy: Spy) -> None:
    model = make(build, family)
    loss = model(**batch).loss
    fused(model)
    twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.counts == expected(family)
    torch.testing.assert_close(loaded(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.counts == (0, 0)
    torch.testing.assert_close(fused(loaded)(**batch).loss, loss, rtol=1e-5, atol=1e-5)
    assert spy.counts == expected(family)


def test_patching_again_adds_fusions_and_repeats_none(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Qwen3")
    before = [dict(module.__dict__) for module in model.modules()]
    tigon.patch(model)
    model(**batch)
    assert spy.counts == (0, 0)
    report = tigon.patch(model, fuse="qk_norm_rope")
    assert [(row.form, row.count, row.reason) for row in report if row.form in FUSIONS] == [("qk_norm_rope", 2, "")]
    model(**batch)
    assert spy.counts == (0, 2)
    first = fused(model) and tigon.patch(model)
    again = tigon.patch(model, fuse=FUSIONS)
    assert {row.reason for row in again} == {"already patched"}
    assert [(row.form, row.variant, row.count) for row in again] == [(r.form, r.variant, r.count) for r in first]
    assert {"rope", *FUSIONS} <= {row.form for row in again}
    model(**batch)
    assert spy.counts == (2, 2)
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


@pytest.mark.parametrize("wrong", ["all", ["rms_norm"], [None], 3, ("add_rms_norm", "x")])
def test_unknown_fusions_are_errors_that_list_them(wrong: Any, build: Any) -> None:
    names = "add_rms_norm, qk_norm_rope, glu_linear, rms_norm_mlp, lora_linear"
    with pytest.raises(ValueError, match=f"fuse: expected some of {names}, got"):
        tigon.patch(build("Llama"), fuse=wrong)


def test_fusions_follow_the_choice_of_modules_and_need_the_norms(build: Any, batch: Any, spy: Spy) -> None:
    model = fused(build("Qwen3"), skip=["model.layers.0", "model.layers.1.self_attn"])
    model(**batch)
    assert spy.counts == (1, 1)
    model = fused(build("Qwen3"), only=["glu", "rope"])
    model(**batch)
    assert spy.counts == (0, 0)
    with tigon.patch_on_build(type(model), fuse=FUSIONS):
        model = build("Qwen3")
    model(**batch)
    assert spy.counts == (2, 2)
    with pytest.raises(ValueError, match="no norm takes a sum"):
        tigon.patch(build("Olmo2"), fuse=FUSIONS, strict=True)


@pytest.mark.kernels
@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_the_kernels_in_a_fused_model(
    family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build(family, num_hidden_layers=1)
    native = step(model, batch)
    fused(model)
    assert_same_step(step(model, batch), native)
    assert spy.counts == expected(family, layers=1)


# ---- what looks on ----


def test_no_hook_sees_anything_but_tensors(build: Any, batch: Any, spy: Spy) -> None:
    model = fused(build("Qwen3"))
    seen: set[type] = set()

    def look(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        for value in (*args, *kwargs.values(), *(output if isinstance(output, tuple) else (output,))):
            seen.add(type(value))

    watched = [m for name, m in model.named_modules() if "norm" not in name]
    hooks = [m.register_forward_pre_hook(look, with_kwargs=True) for m in watched]
    hooks += [m.register_forward_hook(look, with_kwargs=True) for m in watched]
    model(**batch)
    assert spy.counts == (2, 2)
    assert Tensor in seen
    assert not [cls for cls in seen if issubclass(cls, Deferred)]


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(lambda module, args, y: y * 2),
    "pre-forward": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "backward": lambda m: m.register_full_backward_hook(lambda module, dx, dy: (dx[0] * 0.5,)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda module, dy: (dy[0] * 0.5,)),
}


@pytest.mark.parametrize("hook", [*HOOKS, "global"])
def test_norms_with_hooks_are_given_tensors(
    hook: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    native = build("Qwen3")
    model = fused(copy.deepcopy(native))
    handles = []
    if hook == "global":
        handles.append(nn.modules.module.register_module_forward_hook(lambda module, args, y: None))
    else:
        for each in (native, model):
            HOOKS[hook](each.model.layers[0].post_attention_layernorm)
            HOOKS[hook](each.model.layers[1].self_attn.k_norm)
    try:
        wanted = step(native, batch)
        spy.counts  # noqa: B018
        assert_same_step(step(model, batch), wanted)
    finally:
        for handle in handles:
            handle.remove()
    assert spy.counts == ((0, 0) if hook == "global" else (1, 1))


def test_hooks_of_accelerate_are_given_tensors(build: Any, batch: Any, step: Any, spy: Spy) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = fused(build("Qwen3"))
    loss = model(**batch).loss
    assert spy.counts == (2, 2)
    tigon.unpatch(model)
    for layer in model.model.layers:
        for module in (layer.post_attention_layernorm, layer.self_attn.q_norm, layer, layer.self_attn):
            hooks.add_hook_to_module(module, hooks.ModelHook())
    fused(model)
    torch.testing.assert_close(model(**batch).loss, loss)
    assert spy.counts == (0, 0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_train_as_without_patching(
    when: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        # A norm that is trained as a whole is another module, which takes tensors.
        config = peft.LoraConfig(
            r=2,
            init_lora_weights=False,
            target_modules=["q_proj", "k_proj", "o_proj", "up_proj"],
            modules_to_save=["layers.1.post_attention_layernorm"],
        )
        return peft.get_peft_model(model, config).train()

    native = step(adapted(build("Qwen3")), batch)
    spy.counts  # noqa: B018
    model = build("Qwen3")
    model = adapted(fused(model)) if when == "before" else fused(adapted(model))
    assert_same_step(step(model, batch), native)
    assert spy.counts == (1, 2)


def test_a_compiled_model_does_without(build: Any, batch: Any, spy: Spy) -> None:
    torch._dynamo.reset()
    model = build("Qwen3", num_hidden_layers=1)
    native = model(**batch).loss
    fused(model)
    loss = torch.compile(model, fullgraph=True, backend="eager")(**batch, use_cache=False).loss
    torch.testing.assert_close(loss, native, rtol=1e-5, atol=1e-5)
    assert spy.counts == (0, 0)
    torch._dynamo.reset()


def test_an_exception_or_another_thread_finds_norms_that_norm(
    build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fused(build("Qwen3"))
    attention = model.model.layers[0].self_attn
    x, seen = torch.randn(2, 9, 2, 8), []

    def fails(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        other = threading.Thread(target=lambda: seen.append(type(attention.q_norm(x))))
        other.start()
        other.join()
        seen.append(type(attention.q_norm(x)))
        raise RuntimeError("on purpose")

    monkeypatch.setattr(attention.o_proj, "forward", fails.__get__(attention.o_proj))
    with pytest.raises(RuntimeError, match="on purpose"):
        model(**batch)
    assert seen == [Tensor, _norms.NormedHeads]
    assert type(attention.q_norm(x)) is Tensor
    assert "_tigon_defer" not in attention.q_norm.__dict__


def test_layers_of_a_kind_are_tried_once(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    verify = _add_norm.verify
    monkeypatch.setattr(_add_norm, "verify", lambda *args: calls.append(1) or verify(*args))
    model = build("Qwen3", num_hidden_layers=5, rms_norm_eps=3e-5)
    fused(model)
    assert len(calls) == 1


# ---- layers ----


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        n = x.float()
        return self.weight * (n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))


class Layer(nn.Module):
    """Two blocks with their norms; subclasses say how they are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = Norm(), Norm(), Block(), Block()

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def forward(self, x: Tensor) -> Tensor:
        x = self.join(x, self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


def joined(join: Callable[[Any, Any], Any]) -> type[Layer]:
    return type("Joined", (Layer,), {"join": lambda self, x, branch: join(x, branch)})


class Dropout(Layer):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + F.dropout(branch, 0.5, self.training)


class Parallel(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm1(x)) + self.mlp(self.norm2(x))


class AfterNorm(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class SumElsewhereToo(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x)) * x.sigmoid()


class SumToABlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return self.norm2(x) + self.mlp(x)


class TwoSums(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.attention(self.norm2(x))
        return x + self.mlp(self.norm2(x))


class SumTakenTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return self.norm1(x) + self.mlp(self.norm2(x))


class Returns(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x + self.attention(self.norm1(x))
        return total + self.mlp(self.norm2(total)), total


# By name: the layer, and how many norms add in it.
LAYERS: dict[str, tuple[type[Layer], int]] = {
    "plain": (Layer, 1),
    "branch first": (joined(lambda x, b: b + x), 1),
    "torch.add": (joined(torch.add), 1),
    "method": (joined(lambda x, b: x.add(b)), 0),
    "branch scaled": (joined(lambda x, b: x + 0.3 * b), 1),
    "dropout": (Dropout, 1),
    "two sums": (TwoSums, 2),
    "sum elsewhere too": (SumElsewhereToo, 1),
    "sum taken twice": (SumTakenTwice, 1),
    "sum returned": (Returns, 1),
    "after the norms": (AfterNorm, 0),
    "stream scaled": (joined(lambda x, b: 0.5 * x + b), 0),
    "sum scaled": (joined(lambda x, b: (x + b) * 0.5), 0),
    "alpha": (joined(lambda x, b: torch.add(x, b, alpha=2)), 0),
    "broadcast": (joined(lambda x, b: x + b.mean(0)), 0),
    "in place": (joined(lambda x, b: b.clone().add_(x)), 0),
    "detached": (joined(lambda x, b: x.detach() + b), 0),
    "parallel": (Parallel, 0),
    "sum to a block": (SumToABlock, 0),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("training", [True, False])
def test_layers_compute_the_same_whatever_they_do_with_the_sum(name: str, training: bool, spy: Spy) -> None:
    torch.manual_seed(0)
    cls, adds = LAYERS[name]
    layer = cls().train(training)
    x, upstream = torch.randn(3, 4, 16), torch.randn(3, 4, 16)

    def run() -> list[Tensor]:
        layer.zero_grad()
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        results = layer(leaf)
        results = results if isinstance(results, tuple) else (results,)
        assert all(type(result) is Tensor for result in results)
        sum(result * upstream for result in results).sum().backward()
        return [*results, leaf.grad, *(p.grad for p in layer.parameters())]

    native = run()
    report = tigon.patch(layer, fuse="add_rms_norm")
    (row,) = [row for row in report if row.form == "add_rms_norm"]
    assert (row.verdict, bool(row.reason)) == (("replaced", False) if adds else ("kept", True))
    for actual, wanted in zip(run(), native, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)
    assert spy.added == adds


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


# In here reading the code does not find it.
FUNCTIONS = [Same]


def same(x: Tensor) -> Tensor:
    return Same.apply(x)


class CheckpointsInTraining(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        if not self.training:
            return x + self.mlp(self.norm2(x))
        return x + checkpoint(lambda y: self.mlp(self.norm2(y)), x, use_reentrant=True)


class FunctionInTraining(Layer):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return same(x + branch) if self.training else x + branch


class FunctionNotNamed(Layer):
    """What reading the code does not find, the run in training does."""

    function = ("apply", Same)

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return getattr(self.function[1], self.function[0])(x + branch) if self.training else x + branch


class OtherSumInTraining(Layer):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return 2 * x + branch if self.training else x + branch


class KeepsTheSum(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.total = x + self.attention(self.norm1(x))
        return self.total + self.mlp(self.norm2(self.total))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (CheckpointsInTraining, "checkpoint in CheckpointsInTraining.forward"),
        (FunctionInTraining, "apply in same"),
        (FunctionNotNamed, "raised RuntimeError in the probe: tigon: an autograd function"),
        (OtherSumInTraining, "no norm takes a sum that it makes"),
        (KeepsTheSum, "keeps a record in total"),
    ],
)
def test_layers_that_do_otherwise_in_training_are_kept(layer: type[Layer], reason: str) -> None:
    row = next(row for row in tigon.patch(layer(), fuse="add_rms_norm") if row.form == "add_rms_norm")
    assert row.verdict == "kept"
    assert reason in row.reason


@pytest.mark.parametrize("hidden", [False, True])
def test_heads_that_are_handed_to_an_autograd_function_in_training_are_normalised_first(
    hidden: bool, build: Any, batch: Any, step: Any, assert_same_step: Any
) -> None:
    keep = (lambda x: getattr(FUNCTIONS[0], "app" + "ly")(x)) if hidden else same

    class Attention(Qwen3Attention):
        def forward(self, hidden_states: Any, position_embeddings: Any, attention_mask: Any, **kwargs: Any) -> Any:
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
            v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
            if self.training:
                q, k = keep(q), keep(k)
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
            y, weights = eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
            return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights

    model = build("Qwen3", num_hidden_layers=1, attn_implementation="eager")
    model.model.layers[0].self_attn.__class__ = Attention
    native = copy.deepcopy(model)
    report = tigon.patch(model, fuse="qk_norm_rope")
    row = next(row for row in report if row.form == "qk_norm_rope")
    assert row.verdict == "kept"
    assert ("autograd function" if hidden else "apply in same") in row.reason
    assert_same_step(step(model, batch), step(native, batch))


def test_a_use_that_the_trial_did_not_see_gets_the_sum(spy: Spy) -> None:
    class Branches(Layer):
        flag = False

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x))
            if self.flag:
                x = torch.where(x > 0, x, x * 0.1) + x.abs().sum(-1, keepdim=True) + x[..., :1] + len(x)
            return x + self.mlp(self.norm2(x))

    layer = Branches()
    x = torch.randn(3, 4, 16)
    layer.flag = True
    native = layer(x)
    layer.flag = False
    tigon.patch(layer, fuse="add_rms_norm")
    layer(x)
    assert spy.counts == (1, 0)
    layer.flag = True
    torch.testing.assert_close(layer(x), native)
    assert spy.counts == (0, 0)


def test_a_stream_looks_like_the_sum_it_stands_for() -> None:
    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    stream = Stream(a) + b
    total = a + b
    assert isinstance(stream, Stream)
    assert (stream.shape, stream.dtype, stream.device) == (total.shape, total.dtype, total.device)
    assert (stream.ndim, stream.dim(), stream.size(0), len(stream)) == (2, 2, 2, 2)
    assert stream.real is None
    assert (Stream(a) + b.bfloat16()).dtype == torch.float32
    assert torch.equal(stream * 2, total * 2)
    # Computed once, and what it was computed from is let go.
    assert stream.terms is None
    assert stream.materialise() is stream.materialise()
    assert stream.requires_grad
    assert torch.equal((b + Stream(a)).relu(), total.relu())
    assert type(Stream(a) + 1) is Tensor
    assert type(Stream(a) + b[0]) is Tensor
    assert type(b + (Stream(a) + b)) is Stream


@pytest.mark.parametrize("branch_first", [False, True])
def test_a_sum_lies_in_memory_as_without(branch_first: bool) -> None:
    class Transposed(Layer):
        def forward(self, x: Tensor) -> Any:
            branch = self.attention(self.norm1(x)).transpose(0, 1).contiguous().transpose(0, 1)
            x = branch + x if branch_first else x + branch
            return self.norm2(x) + self.mlp(self.norm1(x)), x

    layer, x = Transposed(), torch.randn(3, 4, 16)
    native = [result.stride() for result in layer(x)]
    report = tigon.patch(layer, fuse="add_rms_norm")
    assert "add_rms_norm" in {row.form for row in report.replaced}
    with tigon.backend("torch"):
        assert [result.stride() for result in layer(x)] == native
