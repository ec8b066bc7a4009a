"""The output layer and the loss: what is fused, what is materialised, and what the caller gets."""

from __future__ import annotations

import copy
import inspect
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tigon
from tigon.patch import _head
from tigon.patch._head import DeferredLogits


class Spy:
    """What the output layer was asked for: calls of the fused loss, and logits that were formed after all."""

    def __init__(self) -> None:
        self.fused: list[dict[str, Any]] = []
        self.materialised = 0


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    seen, fused, materialise = Spy(), _head.linear_cross_entropy, DeferredLogits.materialise

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.fused.append(kwargs)
        return fused(*args, **kwargs)

    def counted_materialise(self: DeferredLogits) -> torch.Tensor:
        seen.materialised += self.real is None
        return materialise(self)

    monkeypatch.setattr(_head, "linear_cross_entropy", counted)
    monkeypatch.setattr(DeferredLogits, "materialise", counted_materialise)
    return seen


def patched(model: nn.Module) -> nn.Module:
    tigon.patch(model, only=["linear_cross_entropy"])
    return model


def with_bias(build: Any, **options: Any) -> nn.Module:
    model = build("Llama", **options)
    model.lm_head.bias = nn.Parameter(torch.randn(61))
    return model


CASES = {
    "plain": (lambda build: build("Llama"), set()),
    "tied": (lambda build: build("Llama", tie_word_embeddings=True), set()),
    "softcap": (lambda build: build("Gemma2"), {"softcap"}),
    "divided": (lambda build: build("Granite"), {"logit_scale"}),
    "multiplied": (lambda build: build("Cohere"), {"logit_scale"}),
    "bias": (with_bias, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_heads_are_fused_and_train_alike(
    case: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    make, options = CASES[case]
    model = make(build)
    native = step(model, batch)
    actual = step(patched(model), batch)
    assert_same_step(actual, native)
    assert actual["output"].logits is None
    assert "logits" not in actual["output"]
    assert (len(spy.fused), spy.materialised) == (1, 0)
    assert options == {"softcap", "logit_scale"} & spy.fused[0].keys()


def forward_with(operation: Any) -> Any:
    """A model forward that puts the logits through `operation`."""

    def forward(self: nn.Module, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        logits = operation(self.lm_head(self.model(input_ids).last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    return forward


def in_place(logits: Any) -> Any:
    logits.div_(3)
    return logits


def in_place_operator(logits: Any) -> Any:
    logits *= 0.5
    return logits


def masked(logits: Any) -> Any:
    logits[:, :, 5] = -1e4
    return logits


FUSED = {
    "scale, cap, scale": lambda z: 2 * (torch.tanh(z * 0.3 / 4) * 8),
    "cap of one": lambda z: (z / 5).tanh(),
    "float, contiguous": lambda z: z.float().contiguous() / 2,
    "to": lambda z: z.to(torch.float32) * 3,
    "to dtype=": lambda z: z.to(dtype=torch.float32),
    "all columns": lambda z: z[..., :61],
    "all rows": lambda z: z[:, -9:, :] * 2,
    "rows around a scale": lambda z: (z[..., 0:, :] / 2)[:, :],
}
MATERIALISED = {
    "sigmoid": torch.sigmoid,
    "two caps": lambda z: z.tanh().tanh(),
    "negative cap": lambda z: -3 * z.tanh(),
    "plus": lambda z: z + 1,
    "reversed minus": lambda z: 1 - z,
    "power": lambda z: z**2,
    "negated": lambda z: -z,
    "times a tensor": lambda z: z * torch.linspace(1, 2, 61),
    "a tensor times": lambda z: torch.linspace(1, 2, 61) * z,
    "over a tensor": lambda z: z / torch.linspace(1, 2, 61),
    "clamp": lambda z: z.clamp(-1, 1),
    "function": lambda z: F.softplus(z),
    "every other column": lambda z: z[:, :, ::2].repeat_interleave(2, -1)[..., :61],
    "no last axis": lambda z: torch.stack([z[:, i] for i in range(9)], 1),
    "another axis": lambda z: z[:, None][:, 0],
    "concatenated": lambda z: torch.cat([z[..., :30], z[..., 30:]], -1),
    "in place method": in_place,
    "in place operator": in_place_operator,
    "assignment": masked,
    "view": lambda z: z.view(2, 9, 61) * 2,
    "to device": lambda z: z.to("cpu"),
    "recorded after a real operation": lambda z: torch.where(z > 0, z, z * 0.1) / 2,
}


@pytest.mark.parametrize("name", [*FUSED, *MATERIALISED])
def test_known_operations_are_fused_and_unknown_ones_materialise(
    name: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = FUSED.get(name) or MATERIALISED[name]
    model = build("Llama")
    monkeypatch.setattr(type(model), "forward", forward_with(operation))
    native = step(model, batch)
    assert_same_step(step(patched(model), batch), native)
    assert (len(spy.fused), spy.materialised > 0) == ((1, False) if name in FUSED else (0, True))


def with_own_cross_entropy(loss: Any) -> Any:
    """A model forward that computes its loss itself, by `loss(logits, labels)`."""

    def forward(self: nn.Module, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        # The name by which it is known that there is a loss to look at.
        value = None if labels is None else loss(F.cross_entropy, logits, labels)
        return CausalLMOutputWithPast(loss=value, logits=logits)

    return forward


def shifted(cross_entropy: Any, logits: Any, labels: torch.Tensor) -> Any:
    return cross_entropy(logits[..., :-1, :].contiguous().view(-1, 61), labels[..., 1:].contiguous().view(-1))


OWN_LOSS_FUSED = {
    "class": lambda ce, z, y: nn.CrossEntropyLoss()(z.view(-1, 61), y.view(-1)),
    "shifted": shifted,
    "capped": lambda ce, z, y: ce((torch.tanh(z / 3) * 3).reshape((-1, 61)), y.reshape(-1)),
    "sizes": lambda ce, z, y: ce(z.view(18, 61), y.view(-1).masked_fill(y.view(-1) < 0, 7), ignore_index=7),
    "padded": lambda ce, z, y: ce(z[..., :50].view(-1, 50), y.view(-1).clamp(max=49)),
}
OWN_LOSS_MATERIALISED = {
    "sum": lambda ce, z, y: ce(z.view(-1, 61), y.view(-1), reduction="sum"),
    "smoothed": lambda ce, z, y: ce(z.view(-1, 61), y.view(-1), label_smoothing=0.1),
    "weighted": lambda ce, z, y: ce(z.view(-1, 61), y.view(-1), weight=torch.linspace(1, 2, 61)),
    "classes second": lambda ce, z, y: ce(z.transpose(1, 2), y),
    "probabilities": lambda ce, z, y: ce(z.view(-1, 61), F.one_hot(y.view(-1).clamp(min=0), 61).float()),
    "another loss": lambda ce, z, y: F.nll_loss(z.view(-1, 61).log_softmax(-1), y.view(-1)),
}


@pytest.mark.parametrize("name", [*OWN_LOSS_FUSED, *OWN_LOSS_MATERIALISED])
def test_a_cross_entropy_in_the_forward_is_fused_where_it_is_the_mean(
    name: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Llama")
    loss = OWN_LOSS_FUSED.get(name) or OWN_LOSS_MATERIALISED[name]
    monkeypatch.setattr(type(model), "forward", with_own_cross_entropy(loss))
    native = step(model, batch)
    assert_same_step(step(patched(model), batch), native)
    assert (len(spy.fused), spy.materialised > 0) == ((1, False) if name in OWN_LOSS_FUSED else (0, True))
    assert model.forward(**batch).logits is None
    # It knows no shift_labels, so that these alone are no labels.
    assert model(batch["input_ids"], shift_labels=batch["labels"]).loss is None
    tigon.unpatch(model)
    assert model(**batch).logits is not None
    assert "_loss_function" not in model.__dict__


def test_a_cross_entropy_in_the_forward_rounds_as_the_logits(
    build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Llama").bfloat16()
    monkeypatch.setattr(type(model), "forward", with_own_cross_entropy(shifted))
    native = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = model(**batch).loss
    patched(model)
    torch.testing.assert_close(model(**batch).loss, native)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(**batch).loss, under_autocast, rtol=1e-2, atol=1e-2)


def edit_after_a_slice(logits: Any) -> Any:
    part = logits[:, :9]
    logits.div_(3)
    return part


def edit_of_a_slice(logits: Any) -> Any:
    logits[:, :4].mul_(0.1)
    return logits


def edit_after_columns_and_a_matrix(logits: Any) -> Any:
    matrix = logits[..., :61].view(-1, 61)
    logits[0] = 0.5
    return matrix.view(2, 9, 61)


def edit_after_a_copy(logits: Any) -> Any:
    part = logits[:, 1:].contiguous() * 2
    logits.zero_()
    return torch.cat([logits[:, :1], part], 1)


def edit_then_scale_a_slice(logits: Any) -> Any:
    part = logits[:, :9]
    logits.add_(1)
    return part * torch.linspace(1, 2, 61)


@pytest.mark.parametrize(
    "edit",
    [edit_after_a_slice, edit_of_a_slice, edit_after_columns_and_a_matrix, edit_after_a_copy, edit_then_scale_a_slice],
)
def test_edits_in_place_are_seen_where_the_memory_is_shared(
    edit: Any, build: Any, batch: Any, step: Any, assert_same_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("Llama")
    monkeypatch.setattr(type(model), "forward", forward_with(edit))
    native = step(model, batch)
    assert_same_step(step(patched(model), batch), native)


def test_fewer_columns_than_the_head_has_are_sliced_from_the_weight(
    build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded head of 61 rows for a vocabulary of 50."""
    model = with_bias(build)
    model.config.vocab_size = 50
    batch = {"input_ids": batch["input_ids"] % 50, "labels": batch["labels"].clamp(max=49)}
    monkeypatch.setattr(type(model), "forward", forward_with(lambda z: z[..., :50] / 2))
    native = step(model, batch)
    assert_same_step(step(patched(model), batch), native)
    assert (len(spy.fused), spy.materialised) == (1, 0)


def test_b92_logits_are_absent_only_in_training_with_labels(build: Any, batch: Any) -> None:
    model, ids = build("Llama"), batch["input_ids"]
    logits = model(ids).logits
    patched(model)
    assert model(**batch).logits is None
    torch.testing.assert_close(model(ids).logits, logits)
    kept = model(**batch, skip_logits=False)
    torch.testing.assert_close(kept.logits, logits)
    torch.testing.assert_close(kept.loss, model(**batch).loss)
    evaluated = model.eval()(**batch)
    torch.testing.assert_close(evaluated.logits, logits)
    torch.testing.assert_close(evaluated.loss, kept.loss)


def test_b94_logits_can_be_skipped_in_evaluation(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Gemma2").eval()
    with torch.no_grad():
        native = model(**batch)
        patched(model)
        output = model(**batch, skip_logits=True)
    assert output.logits is None
    assert len(spy.fused) == 1
    torch.testing.assert_close(output.loss, native.loss, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="skip_logits=True: expected labels"):
        model(batch["input_ids"], skip_logits=True)


def test_b96_shifted_labels_win_and_shards_add_up(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Llama")
    ids, labels = batch["input_ids"], batch["labels"]
    whole = model(**batch).loss
    patched(model)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    torch.testing.assert_close(model(ids, labels=labels, shift_labels=shifted).loss, whole)
    torch.testing.assert_close(model(ids, labels=ids, shift_labels=shifted).loss, whole)
    # Labels that are shifted are enough; a model asks for `labels` only to know that there are any.
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, whole)
    torch.testing.assert_close(model.eval()(ids, shift_labels=shifted).loss, whole)
    count = (shifted != -100).sum()
    model.train()
    shards = [model(ids[i : i + 1], shift_labels=shifted[i : i + 1], num_items_in_batch=count).loss for i in (0, 1)]
    torch.testing.assert_close(sum(shards), whole)
    assert spy.materialised == 0
    # Still callable with real logits, as trainers that compute the loss themselves do.
    logits = model(ids).logits
    torch.testing.assert_close(
        model.loss_function(logits=logits, labels=None, shift_labels=shifted, vocab_size=61), whole
    )


@pytest.mark.parametrize("count", [12, torch.tensor(12), torch.tensor([12])], ids=["int", "0-dim", "one element"])
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi3"])
def test_b01_b06_the_given_count_divides_once_in_any_shape(
    count: Any, family: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build(family)
    native = step(model, batch, num_items_in_batch=12)
    actual = step(patched(model), batch, num_items_in_batch=count)
    assert actual["loss"].shape == ()
    assert_same_step(actual, native)
    assert len(spy.fused) == 1


def test_another_ignore_index_is_passed_on(build: Any, batch: Any) -> None:
    model = build("Llama")
    batch["labels"] = batch["labels"].masked_fill(batch["labels"] == -100, -7)
    native = model(**batch, ignore_index=-7).loss
    torch.testing.assert_close(patched(model)(**batch, ignore_index=-7).loss, native)


def test_no_valid_label_gives_zero_and_zero_gradients(build: Any, batch: Any, step: Any) -> None:
    """The written choice; the native loss is NaN."""
    batch["labels"] = torch.full_like(batch["labels"], -100)
    actual = step(patched(build("Llama")), batch)
    assert float(actual["loss"]) == 0.0
    assert all(not grad.any() for grad in actual["grads"].values())


def test_tuples_keep_their_positions(build: Any, batch: Any) -> None:
    model = build("Llama")
    native = model(**batch, return_dict=False)
    output = patched(model)(**batch, return_dict=False)
    assert len(output) == len(native)
    torch.testing.assert_close(output[0], native[0])
    assert output[1] is None


def test_labels_may_be_positional(build: Any, batch: Any, spy: Spy) -> None:
    model = patched(build("Llama"))
    names = list(inspect.signature(model.forward).parameters)
    args = [batch.get(name) for name in names[: names.index("labels") + 1]]
    assert model(*args).logits is None
    assert len(spy.fused) == 1


def test_hidden_states_and_logits_to_keep_behave_as_natively(build: Any, batch: Any) -> None:
    model = build("Llama")
    native = model(**batch, output_hidden_states=True)
    kept = model(batch["input_ids"], logits_to_keep=2).logits
    patched(model)
    output = model(**batch, output_hidden_states=True)
    assert output.keys() == native.keys() - {"logits"} or list(output) == [k for k in native if k != "logits"]
    assert len(output.hidden_states) == len(native.hidden_states)
    torch.testing.assert_close(model(batch["input_ids"], logits_to_keep=2).logits, kept)
    with pytest.raises(ValueError, match="batch_size"):
        build("Llama")(**batch, logits_to_keep=2)
    with pytest.raises(ValueError, match="batch_size"):
        model(**batch, logits_to_keep=2)


def test_deepcopies_use_their_own_weights(build: Any, batch: Any, spy: Spy) -> None:
    model = build("Llama")
    tigon.patch(model)
    loss = model(**batch).loss
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(**batch).loss, loss)
    twin(**batch).loss.backward()
    assert twin.lm_head.weight.grad is not None
    assert model.lm_head.weight.grad is None
    assert len(spy.fused) == 3


def test_autocast_computes_as_the_native_head_does(build: Any, batch: Any, step: Any, spy: Spy) -> None:
    """No further from the fp32 loss than native autocast is, with gradients in the dtype of the weights."""
    model = build("Llama")
    exact = step(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        native = step(model, batch)
        actual = step(patched(model), batch)
    assert len(spy.fused) == 1
    for name, want in exact["grads"].items():
        assert actual["grads"][name].dtype == torch.float32
        error, own = ((s["grads"][name] - want).square().mean().sqrt() for s in (actual, native))
        assert error <= 1.5 * own + 1e-6 * want.abs().max(), name
    assert abs(actual["loss"] - exact["loss"]) <= 2 * abs(native["loss"] - exact["loss"]) + 1e-3


def test_gradient_checkpointing_and_frozen_heads(
    build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    model = build("Llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.lm_head.requires_grad_(False)
    native = step(model, batch)
    tigon.patch(model)
    actual = step(model, batch)
    assert_same_step(actual, native)
    assert "lm_head.weight" not in actual["grads"]
    assert len(spy.fused) == 1


class ScaledLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 1.5


def test_heads_losses_and_models_that_are_not_the_form_are_kept_with_the_reason(build: Any) -> None:
    model = build("Llama")
    head = ScaledLinear(32, 61, bias=False)
    model.lm_head = head
    with pytest.warns(UserWarning, match="output layer is a ScaledLinear"):
        patched(model)
    assert "forward" not in model.__dict__

    model = build("Llama")
    model.loss_function = lambda logits, labels, **_: logits.float().mean()
    with pytest.warns(UserWarning, match="its loss function is <lambda>"):
        patched(model)


def test_a_loss_assigned_after_patching_gets_real_logits(build: Any, batch: Any) -> None:
    model = build("Llama")

    def own_loss(logits: Any, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
        return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1).clamp(min=0))

    model.loss_function = own_loss
    native = model(**batch).loss
    del model._loss_function
    patched(model)
    model.loss_function = own_loss
    torch.testing.assert_close(model(**batch).loss, native)
    tigon.unpatch(model)
    assert model.loss_function is own_loss


def test_an_exception_in_the_forward_lowers_the_flag(build: Any, batch: Any) -> None:
    model = patched(build("Llama"))
    with pytest.raises(ValueError, match="exactly one"):
        model(**batch, inputs_embeds=torch.ones(1))
    assert isinstance(model.lm_head(torch.randn(1, 32)), torch.Tensor)


def test_deferred_logits_look_like_the_tensor_they_stand_for(build: Any, batch: Any) -> None:
    model = patched(build("Llama"))
    hidden = torch.randn(2, 9, 32)
    real = model.lm_head(hidden)
    model.lm_head._tigon_defer = threading.get_ident()
    deferred = model.lm_head(hidden)
    assert isinstance(deferred, DeferredLogits)
    assert (deferred.shape, deferred.dtype, deferred.device) == (real.shape, real.dtype, real.device)
    assert (deferred.dim(), deferred.ndim, deferred.size(-1), len(deferred)) == (3, 3, 61, 2)
    assert deferred.real is None
    assert bool((deferred == real).all())
    assert {deferred: 1}[deferred] == 1
    assert torch.equal(torch.stack([deferred, real])[0], real)
    assert torch.equal(deferred.argmax(-1), real.argmax(-1))
    assert torch.equal(deferred[:, -1], real[:, -1])
    assert torch.equal(model.lm_head(hidden)[:, 1:-1, :].materialise(), real[:, 1:-1])
    with pytest.raises(AttributeError):
        _ = deferred.no_such_attribute


HOOKS = {
    "forward": lambda head: head.register_forward_hook(lambda module, inputs, output: output / 2),
    "pre-forward": lambda head: head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
    "backward": lambda head: head.register_full_backward_hook(lambda module, dinputs, doutputs: (dinputs[0] * 0.5,)),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_on_the_output_layer_see_logits(
    name: str, build: Any, batch: Any, step: Any, assert_same_step: Any, spy: Spy
) -> None:
    native = build("Llama")
    model = patched(copy.deepcopy(native))
    for each in (native, model):
        HOOKS[name](each.lm_head)
    assert_same_step(step(model, batch), step(native, batch))
    assert not spy.fused


def test_another_thread_gets_real_logits(build: Any, batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(build("Llama")).train()
    hidden = torch.zeros(1, 1, model.config.hidden_size)
    seen: list[type] = []
    inner = type(model.model).forward

    def with_a_thread(self: Any, *args: Any, **kwargs: Any) -> Any:
        other = threading.Thread(target=lambda: seen.append(type(model.lm_head(hidden))))
        other.start()
        other.join()
        seen.append(type(model.lm_head(hidden)))
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", with_a_thread)
    model(**batch)
    assert seen == [torch.Tensor, DeferredLogits]
