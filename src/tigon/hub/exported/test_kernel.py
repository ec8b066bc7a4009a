"""Tests of this copy, with torch and pytest alone: `python -m pytest tests`, with a GPU or with TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read when Triton is loaded, which this copy does.
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda" if HAS_GPU else "cpu"
BUILD = Path(__file__).resolve().parents[1] / "build"
BACKEND = (
    "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "xpu" if torch.xpu.is_available() else "cpu"
)


def _load():
    folder = BUILD / f"torch-{BACKEND}"
    name = json.loads((folder / "metadata.json").read_text())["id"]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


kernel = _load()


def _inputs(name: str) -> tuple[tuple[torch.Tensor, ...], dict]:
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, requires_grad=True)

    tables = torch.randn(2, 1, 6, 8, device=DEVICE)
    labels = torch.tensor([3, -100, 0, 12, 5], device=DEVICE)
    return {
        "rms_norm": ((draw(5, 24), draw(24)), {"offset": 1.0}),
        "rms_norm_gated": ((draw(5, 24), draw(24), draw(5, 24)), {}),
        "swiglu": ((draw(5, 24), draw(5, 24)), {}),
        "glu": ((draw(5, 24),), {"activation": "gelu_tanh"}),
        "rope": ((draw(2, 4, 6, 8), draw(2, 2, 6, 8), *tables.unbind()), {}),
        "cross_entropy": ((draw(5, 13), labels), {}),
        "linear_cross_entropy": ((draw(5, 24), draw(13, 24), labels), {}),
    }[name]


NAMES = ["rms_norm", "rms_norm_gated", "swiglu", "glu", "rope", "cross_entropy", "linear_cross_entropy"]


@pytest.mark.parametrize("name", NAMES)
def test_operator_and_its_gradient_are_those_of_the_reference(name: str) -> None:
    inputs, options = _inputs(name)
    leaves = [t for t in inputs if t.requires_grad]
    results = []
    for function in (getattr(kernel, name), getattr(kernel, f"{name}_reference")):
        y = function(*inputs, **options)
        parts = y if isinstance(y, tuple) else (y,)
        weights = [torch.linspace(-1, 2, t.numel(), device=DEVICE).reshape(t.shape) for t in parts]
        total = sum((t * w).sum() for t, w in zip(parts, weights, strict=True))
        results.append([*parts, *torch.autograd.grad(total, leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def test_kernels_run_here() -> None:
    inputs, _ = _inputs("rms_norm")
    assert kernel.why_not("rms_norm", *inputs) == []


def test_operators_are_registered_under_a_name_of_this_copy() -> None:
    name = json.loads((Path(kernel.__file__).parent / "metadata.json").read_text())["id"].removeprefix("_")
    registered = getattr(torch.ops, name)
    x, weight = (t.detach() for t in _inputs("rms_norm")[0])
    signature = registered.rms_norm_fwd.default._schema
    arguments = {"x": x, "weight": weight, "eps": 1e-6, "offset": 0.0}
    values = [arguments.get(a.name, a.default_value if a.has_default_value() else None) for a in signature.arguments]
    values = [
        {"int": 0, "bool": False, "str": "cast_then_scale"}.get(str(a.type)) if v is None else v
        for a, v in zip(signature.arguments, values, strict=True)
    ]
    torch.library.opcheck(registered.rms_norm_fwd.default, tuple(values))


@pytest.mark.parametrize("name", [n for n in kernel.layers.__all__ if not n.endswith("Layout")])
def test_layer_obeys_the_rules(name: str) -> None:
    layer = getattr(kernel.layers, name)
    assert issubclass(layer, nn.Module)
    assert layer.__init__ is nn.Module.__init__
    members = {n for n, _ in inspect.getmembers(layer)} - {n for n, _ in inspect.getmembers(nn.Module)}
    assert members == {"has_backward", "can_torch_compile"}
    assert layer.has_backward is layer.can_torch_compile is True


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * x32).to(x.dtype)


def test_layer_takes_the_place_of_a_forward() -> None:
    norm, x = _Norm().to(DEVICE), torch.randn(5, 24, device=DEVICE, requires_grad=True)
    leaves = [x, norm.weight]
    expected = norm(x)
    ours = kernel.layers.RMSNorm.forward(norm, x)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    gradients = (torch.autograd.grad(y.square().sum(), leaves) for y in (ours, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
