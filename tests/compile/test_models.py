"""A whole patched model under the compiler: kernels through registered operators, logits deferred, either order."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.patch.conftest import make_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tigon

KERNELS = {"rms_norm_fwd", "rope_rotate", "glu_fwd", "linear_cross_entropy_fwd"}


def _batch(length: int) -> dict[str, Any]:
    ids = torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(length))
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "use_cache": False}


def _step(model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    output = model(**batch)
    output.loss.backward()
    assert output.logits is None, "the logits were not deferred"
    grads = {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": output.loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}


def _assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, want in expected.items():
        error = (actual[name] - want).abs().max() / want.abs().max()
        # fp32 sums in another order.
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


def _operators(graphs: Iterable[nn.Module]) -> set[str]:
    """Names of the registered operators in graphs, and in those within them."""
    modules = [module for graph in graphs for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = {str(node.target) for module in modules for node in module.graph.nodes}
    return {target.split(".")[1] for target in targets if target.startswith("tigon.")}


def test_one_graph_of_kernels_trains_at_all_lengths() -> None:
    """Through the registered operators; `tests/patch/test_compile.py` has the references."""
    model = make_model("Llama", num_hidden_layers=1)
    native = copy.deepcopy(model)
    tigon.patch(model)
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    for length in (9, 7):
        batch = _batch(length)
        output = native(**batch)
        native.zero_grad()
        output.loss.backward()
        expected = {"loss": output.loss.detach()} | {n: p.grad for n, p in native.named_parameters()}
        _assert_same(_step(compiled, batch), expected)
        counts.append(graphs.frame_count)
    assert counts[0] == counts[1], "another length was traced again"
    assert _operators(graphs.graphs) == KERNELS | {"rms_norm_bwd", "glu_bwd"}


def test_patching_after_compiling_trains_like_before() -> None:
    model = make_model("Gemma2", num_hidden_layers=1)
    native = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = _batch(9)
    assert compiled(**batch).logits is not None
    tigon.patch(model)
    with tigon.backend("torch"):
        actual = _step(compiled, batch)
    native(**batch).loss.backward()
    expected = {name: p.grad for name, p in native.named_parameters()}
    _assert_same({name: actual[name] for name in expected}, expected)
    tigon.unpatch(model)
    assert compiled(**batch).logits is not None


def test_the_backend_may_change_between_calls() -> None:
    model = make_model("Llama", num_hidden_layers=1)
    tigon.patch(model)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    found = []
    for backend in ("torch", "auto", "torch"):
        before = len(graphs.graphs)
        with tigon.backend(backend), torch.no_grad():
            compiled(**_batch(9))
        found.append(_operators(graphs.graphs[before:]) & KERNELS)
    assert found == [{"linear_cross_entropy_fwd"}, KERNELS, set()]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_an_operator_is_called_twice_with_dynamic_floats(name: str) -> None:
    function, weight = getattr(tigon, name), torch.randn(32)

    def twice(x: Tensor, eps: float) -> Tensor:
        return function(function(x, weight, eps=eps), weight, eps=eps)

    compiled = torch.compile(twice, fullgraph=True, dynamic=True, backend="aot_eager")
    for eps in (1e-6, 0.5):
        x = torch.randn(9, 32, requires_grad=True)
        torch.testing.assert_close(compiled(x, eps), twice(x, eps))


@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")
@pytest.mark.parametrize("strict", [False, True])
def test_exports(strict: bool) -> None:
    """A strict export has the registered operators, the other one is of what the model was: torch alone."""
    model = make_model("Llama", num_hidden_layers=1).eval()
    inputs = {"input_ids": _batch(9)["input_ids"], "use_cache": False}
    with torch.no_grad():
        native = model(**inputs).logits
        tigon.patch(model)
        program = torch.export.export(model, (), inputs, strict=strict)
        torch.testing.assert_close(program.module()(**inputs).logits, native, rtol=1e-5, atol=1e-5)
    ours = _operators([program.graph_module])
    assert ours == ({"rms_norm_fwd", "rope_rotate", "glu_fwd"} if strict else set())


# Of torch's own.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_references_under_inductor() -> None:
    """Two operators in one graph, since the compiler for C++ takes most of the time."""
    x, weight, labels = torch.randn(9, 32, requires_grad=True), torch.randn(32), torch.randint(0, 32, (9,))

    def function(x: Tensor) -> Tensor:
        return tigon.cross_entropy(tigon.rms_norm(x, weight), labels)

    with tigon.backend("torch"):
        results = []
        for run in (function, torch.compile(function, fullgraph=True, backend="inductor")):
            x.grad = None
            run(x).backward()
            results.append(x.grad)
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
