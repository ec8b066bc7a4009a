"""CUDA graphs of operators and of a training step, replayed with other data and compared with eager."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from tests.patch.conftest import make_model
from torch import Tensor

import tigon
from tigon.ops import OPS
from tigon.specs import Case, Make, OpSpec, all_specs
from tigon.testing.check import flatten

DEVICE = "cuda"
# Calls before recording: the first compile, and what is chosen by trying is tried.
_WARM = 2


def graph_cases() -> list[tuple[OpSpec, Case]]:
    """The first case of every operator, and the next with other options."""
    found = []
    for spec in all_specs().values():
        kinds: dict[Any, Case] = {}
        for case in spec.cases:
            # What waits for the device is refused while a graph records.
            if not case.models_only and not case.options.get("skip_ignored") and len(kinds) < 2:
                kinds.setdefault(str(sorted(case.options)), case)
        found += [(spec, case) for case in kinds.values()]
    return found


def _draw(spec: OpSpec, case: Case, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Inputs of `case`, other ones for each seed; another number of labels is ignored."""
    named = dataclasses.replace(case, name=f"{case.name} {seed}")
    inputs = spec.inputs(named, Make(named, DEVICE, dtype))
    generator = torch.Generator().manual_seed(seed)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value * (1 + 0.5 * torch.rand((), generator=generator).item())
            inputs[name] = value.detach().requires_grad_(name in spec.wanted(case, inputs))
        elif name == "labels" and isinstance(value, Tensor):
            ignored = torch.rand(value.shape, generator=generator) < 0.3 * seed
            inputs[name] = value.masked_fill(ignored.to(value.device), case.options.get("ignore_index", -100))
    return inputs


def _forward_backward(spec: OpSpec, case: Case, inputs: dict[str, Any]) -> dict[str, Tensor]:
    outputs = flatten(OPS[spec.name].public(**inputs, **case.options))
    given = [y for y in outputs.values() if y.requires_grad]
    wanted = list(spec.wanted(case, inputs))
    grads = torch.autograd.grad(given, [inputs[name] for name in wanted], [torch.ones_like(y) for y in given])
    return {**outputs, **{f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}}


def check_operator(spec: OpSpec, case: Case, dtype: torch.dtype = torch.float32) -> None:
    """Record forward and backward, then replay for other data and compare with eager."""
    static = _draw(spec, case, dtype, 0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            _forward_backward(spec, case, static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = _forward_backward(spec, case, static)
    for seed in (1, 2):
        fresh = _draw(spec, case, dtype, seed)
        with torch.no_grad():
            for name, value in fresh.items():
                if isinstance(value, Tensor):
                    static[name].copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        expected = _forward_backward(spec, case, fresh)
        _compare(f"{spec.name}[{case.name}], data {seed}", recorded, expected)


def _compare(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, want in expected.items():
        got = actual[name].detach()
        if not want.is_floating_point():
            assert torch.equal(got, want), f"{what}: {name}"
            continue
        assert torch.equal(got.isfinite(), want.isfinite()), f"{what}: {name}: what is not finite differs"
        error = torch.nan_to_num(got.float() - want.float()).abs().max() if want.numel() else torch.zeros(())
        # A graph takes the first of several ways, eager the fastest: sums in another order.
        bound = 1e-5 * torch.nan_to_num(want.float()).abs().max() + 1e-6 if want.numel() else torch.ones(())
        assert error <= bound, f"{what}: {name}: {error.item():.1e} of {bound.item():.1e}"


def check_step(family: str = "Llama", optimise: bool = True) -> None:
    """Record a step of a patched model with its optimiser, and train with other tokens and numbers of labels."""
    model = make_model(family).to(DEVICE)
    tigon.patch(model)
    twin = copy.deepcopy(model)
    optimiser, other = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin))

    def batch(seed: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(seed))
        labels = ids.clone()
        labels[:, : 3 * seed % 16] = -100
        return ids.to(DEVICE), labels.to(DEVICE)

    def step(m: Any, o: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> Tensor:
        loss = m(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        if optimise:
            o.step()
        return loss.detach()

    ids, labels = batch(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            optimiser.zero_grad(set_to_none=True)
            step(model, optimiser, ids, labels)
    torch.cuda.current_stream().wait_stream(side)
    optimiser.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(model, optimiser, ids, labels)
    model.load_state_dict(before)
    for seed in (1, 2, 3, 5):
        new_ids, new_labels = batch(seed)
        ids.copy_(new_ids)
        labels.copy_(new_labels)
        graph.replay()
        other.zero_grad(set_to_none=True)
        expected = step(twin, other, new_ids, new_labels)
        torch.cuda.synchronize()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
            # Recorded gradients are written anew, not added to.
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-2, atol=1e-4, msg=lambda t, name=name: f"d{name}: {t}")
