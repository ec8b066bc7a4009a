"""Peers of the fused loss compute it, by the arguments that their packages take."""

from __future__ import annotations

import enum
import importlib
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tigon
from tigon.bench.peers import NAMES, peers

OURS = ("torch_eager", "torch_compile", "torch_builtin")


def _inputs() -> dict[str, Tensor]:
    labels = torch.randint(0, 300, (3, 7))
    labels[0, 3] = -100
    return {
        "hidden": torch.randn(3, 7, 16, requires_grad=True),
        "weight": torch.randn(300, 16, requires_grad=True),
        "labels": labels,
    }


@pytest.mark.parametrize("name", [n for n in NAMES if n not in OURS])
def test_packages_are_imported_when_measured(name: str) -> None:
    module = importlib.import_module(f"tigon.bench.peers.{name}")
    with mock.patch.dict(sys.modules, {module.PEER.requires: None}):
        importlib.reload(module)
        with pytest.raises(ImportError):
            module.PEER.provides["linear_cross_entropy"](**_inputs())


@pytest.mark.parametrize("options", [{}, {"ignore_index": 7}, {"softcap": 3.0, "logit_scale": 0.5}], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_trl_computes_the_loss(has_bias: bool, options: dict[str, Any]) -> None:
    pytest.importorskip("trl.kernels")
    (peer,) = peers(("trl",))
    inputs = _inputs()
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] == -100, options.get("ignore_index", -100))
    if has_bias:
        inputs["bias"] = torch.randn(300, requires_grad=True)
    leaves = [t for t in inputs.values() if t.requires_grad]
    losses = [f(**inputs, **options) for f in (peer.provides["linear_cross_entropy"], tigon.linear_cross_entropy)]
    torch.testing.assert_close(*losses)
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(a, b)


def _cut_cross_entropy(is_exact: bool) -> tuple[types.ModuleType, list[dict[str, Any]]]:
    """A stand-in with the names of the last release, or of the one that has an exact form."""
    module, calls = types.ModuleType("cut_cross_entropy"), []
    names = ["CCE", "TORCH_COMPILE", *(["CCE_EXACT"] if is_exact else [])]
    module.LinearCrossEntropyImpl = enum.IntEnum("LinearCrossEntropyImpl", names)

    def function(e: Tensor, c: Tensor, targets: Tensor, **options: Any) -> Tensor:
        assert e.shape[:-1] == targets.shape
        calls.append(options)
        plain = {k: options[k] for k in ("bias", "ignore_index", "softcap", "reduction") if k in options}
        return tigon.linear_cross_entropy(e, c, targets, **plain)

    module.linear_cross_entropy = function
    return module, calls


@pytest.mark.parametrize("is_exact", [False, True])
def test_cut_cross_entropy_is_asked_for_its_exact_form(is_exact: bool) -> None:
    function = importlib.import_module("tigon.bench.peers.cce").PEER.provides["linear_cross_entropy"]
    inputs = _inputs()
    module, calls = _cut_cross_entropy(is_exact)
    with mock.patch.dict(sys.modules, {"cut_cross_entropy": module}):
        loss = function(**inputs, softcap=4.0)
        torch.testing.assert_close(loss, tigon.linear_cross_entropy(**inputs, softcap=4.0))
        bias = torch.randn(300)
        if is_exact:
            torch.testing.assert_close(function(**inputs, bias=bias), tigon.linear_cross_entropy(**inputs, bias=bias))
        else:
            with pytest.raises(NotImplementedError, match="bias"):
                function(**inputs, bias=bias)
        with pytest.raises(NotImplementedError, match="z_loss"):
            function(**inputs, z_loss=0.1)
    how = {k: v for k, v in calls[0].items() if k in ("impl", "filter_eps")}
    assert how == ({"impl": "cce_exact"} if is_exact else {"impl": "cce", "filter_eps": None})
