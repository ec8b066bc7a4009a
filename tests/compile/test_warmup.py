"""What warming up leaves as it was; that kernels are compiled shows on a GPU only."""

from __future__ import annotations

import pytest
import torch
from tests.patch.conftest import make_model

import tigon
from tigon import _warmup
from tigon.ops import _launch

CPU = torch.device("cpu")


def test_there_is_nothing_to_compile_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tigon.warmup(torch.nn.Linear(2, 2)) == (0, 0.0)
    assert tigon.warmup([(tigon.rms_norm, {"x": torch.empty(2, 4)})], device="cpu") == (0, 0.0)
    assert capsys.readouterr().err == "tigon: nothing to compile on a CPU\n" * 2


@pytest.mark.parametrize("given", [False, True])
def test_a_step_changes_nothing_of_the_model(given: bool) -> None:
    model = make_model("Llama", num_hidden_layers=1)
    tigon.patch(model)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.randint(3, 61, (2, 9))
    with tigon.backend("torch"):
        _warmup._step(model, {"input_ids": ids, "labels": ids} if given else None, (2, 9), CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(first.grad, torch.ones_like(first))
    assert all(p.grad is None for p in model.parameters() if p is not first)


def test_a_model_without_a_loss_is_refused() -> None:
    model = make_model("Llama", num_hidden_layers=1)
    ids = torch.randint(3, 61, (2, 9))
    with pytest.raises(ValueError, match="returns a loss"):
        _warmup._step(model, {"input_ids": ids}, (2, 9), CPU)
    with pytest.raises(ValueError, match="tokens are not known"):
        _warmup._step(torch.nn.Linear(2, 2), None, (2, 9), CPU)


def test_calls_run_forward_and_backward() -> None:
    seen: list[tuple[str, torch.Size, torch.dtype]] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(("forward", x.shape, x.dtype))
            return x * x

        @staticmethod
        def backward(ctx, dy):
            seen.append(("backward", dy.shape, dy.dtype))
            return dy

    for needs_grad in (True, False):
        x = torch.empty(3, 5, dtype=torch.bfloat16, device="meta", requires_grad=needs_grad)
        _warmup._call(lambda x, labels: (Square.apply(x), labels), {"x": x, "labels": torch.zeros(3).long()}, CPU)
    expected = [(name, (3, 5), torch.bfloat16) for name in ("forward", "backward", "forward")]
    assert seen == expected


def test_it_says_what_it_does_when_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(_warmup.time, "monotonic", lambda: now[0])
    with _warmup._watched() as counted:
        for _ in range(5):
            now[0] += 2
            for listener in _launch.listeners:
                listener(test_calls_run_forward_and_backward)
    assert counted() == (5, 10.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "tigon: compiled 2 kernels, 4 s, last test_calls_run_forward_and_backward"
    assert lines[-1] == "tigon: 5 kernels ready after 10 s"
    assert len(lines) == 3
    assert not _launch.listeners
    with _warmup._watched():
        pass
    assert capsys.readouterr().err == ""
