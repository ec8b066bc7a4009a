"""A call like an earlier one is not checked again; one that differs in anything that is checked, is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tigon
from tigon.ops import _op

X, W = torch.randn(4, 8), torch.randn(8)
LABELS = torch.tensor([1, 2, -100, 3])
Q, K, COS = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8), torch.randn(5, 8)


def _norm(**other: Any) -> Any:
    return tigon.rms_norm(**{"x": X, "weight": W, "residual": X, "group_size": 4, **other})


def _layer_norm(**other: Any) -> Any:
    return tigon.layer_norm(**{"x": X, "weight": W, "bias": W, **other})


def _glu(**other: Any) -> Any:
    return tigon.swiglu(**{"gate": X, "up": X, **other})


def _loss(**other: Any) -> Any:
    return tigon.cross_entropy(**{"logits": X, "labels": LABELS, "class_weight": W, **other})


def _rope(**other: Any) -> Any:
    return tigon.rope(**{"q": Q, "k": K, "cos": COS, "sin": COS, **other})


WRONG: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (_norm, {"weight": W[1:]}),
    (_norm, {"weight": W.long()}),
    (_norm, {"weight": [1.0] * 8}),
    (_norm, {"weight": W.to("meta")}),
    (_norm, {"x": X[:, :7]}),
    (_norm, {"residual": X[:3]}),
    (_norm, {"group_size": 3}),
    (_norm, {"group_size": 0}),
    (_norm, {"cast": "round"}),
    (_norm, {"cast": ["none"]}),
    (_norm, {"weight": None, "offset": 1.0}),
    (_layer_norm, {"bias": W[1:]}),
    (_layer_norm, {"weight": W.long()}),
    (_glu, {"up": X[1:]}),
    (_glu, {"up": None, "gate": X[:, :7]}),
    (_glu, {"gate_first": False}),
    (_loss, {"labels": LABELS[1:]}),
    (_loss, {"labels": LABELS.float()}),
    (_loss, {"labels": LABELS + 6}),
    (_loss, {"ignore_index": -1}),
    (_loss, {"ignore_index": 0.5}),
    (_loss, {"label_smoothing": 1.5}),
    (_loss, {"softcap": 0.0}),
    (_loss, {"z_loss": float("nan")}),
    (_loss, {"reduction": "median"}),
    (_loss, {"num_items": -1}),
    (_loss, {"num_items": torch.ones(2)}),
    (_loss, {"class_weight": W[1:]}),
    (_loss, {"class_weight": torch.nn.Parameter(W)}),
    (_rope, {"k": K[:, :, 1:]}),
    (_rope, {"cos": COS[1:]}),
    (_rope, {"sin": COS.double()}),
    (_rope, {"layout": "spiral"}),
    (_rope, {"unsqueeze_dim": 2}),
    (_rope, {"position_ids": torch.arange(1, 6)}),
    (_rope, {"sections": [1, 2]}),
]


@pytest.mark.parametrize(("function", "other"), WRONG, ids=[f"{f.__name__[1:]}-{next(iter(o))}" for f, o in WRONG])
def test_what_is_wrong_is_found_after_a_right_call(function: Callable[..., Any], other: dict[str, Any]) -> None:
    function()
    function()
    with pytest.raises(ValueError):
        function(**other)
    function()


@pytest.mark.parametrize("function", [_norm, _layer_norm, _glu, _rope])
def test_the_checks_are_made_once(function: Callable[..., Any]) -> None:
    function()
    with mock.patch.object(_op, "_reasons", side_effect=AssertionError):
        function()
        with pytest.raises(AssertionError):
            function(**{k: v.double() for k, v in function.__globals__["DOUBLES"][function.__name__].items()})


DOUBLES: dict[str, dict[str, Tensor]] = {
    "_norm": {"x": X},
    "_layer_norm": {"x": X},
    "_glu": {"gate": X},
    "_rope": {"q": Q},
}


def test_the_backend_is_asked_for_each_time() -> None:
    x = X.clone().requires_grad_()
    names = []
    for backend in ("auto", "torch", "auto"):
        with tigon.backend(backend):
            names.append(type(tigon.rms_norm(x).grad_fn).__name__)
    assert names[0] == names[2] == "_RMSNormBackward"
    assert names[1] != names[0]


def test_a_table_that_requires_a_gradient_gets_it() -> None:
    tigon.rope(Q, K, COS, COS)
    cos = COS.clone().requires_grad_()
    tigon.rope(Q, K, cos, COS)[0].sum().backward()
    assert cos.grad is not None
    with torch.no_grad():
        tigon.rope(Q, K, cos, COS)
    cos.grad = None
    tigon.rope(Q, K, cos, COS)[0].sum().backward()
    assert cos.grad is not None


def test_sizes_that_never_come_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "_accepted", set())
    monkeypatch.setattr(_op, "_MAX_ACCEPTED", 3)
    for rows in range(1, 9):
        tigon.rms_norm(torch.randn(rows, 8))
        assert len(_op._accepted) <= 3


def test_nothing_is_accepted_where_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_op, "_accepted", set())
    monkeypatch.setattr(_op, "INTERPRETED", False)
    _op.accept(("a key",), X)
    _op.accept(("a key",), X.to("meta"))
    assert not _op._accepted
