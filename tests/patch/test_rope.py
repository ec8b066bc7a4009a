"""Rotary functions: which are recognised, and that one instance's forward is all that changes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tigon
from tigon.patch import _rope


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def half_back_to_the_input_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    y = half(q, k, cos, sin)
    return y[0].to(q.dtype), y[1].to(k.dtype)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> Any:
    width = cos.shape[-1]
    q_rot, k_rot = half(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim)
    return torch.cat((q_rot, q[..., width:]), -1), torch.cat((k_rot, k[..., width:]), -1)


def half_tables(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(query, key, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim)


def heads_after_tokens(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    return half(q, k, cos, sin, 2)


def one_tensor(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return half(x, x, cos, sin, unsqueeze_dim)[0]


def one_tensor_back_to_the_input_dtype(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return one_tensor(x, cos, sin, unsqueeze_dim).to(x.dtype)


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2) * sin

    return rotate(q), rotate(k)


def negated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(q, k, cos, -sin, unsqueeze_dim)


def first_row_only(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(q, k, cos[:1], sin[:1], unsqueeze_dim)


def scaled_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    y = half(q, k, cos, sin, unsqueeze_dim)
    return y[0], y[1] * 1.01


def with_sections(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Any = (1, 1)) -> Any:
    return half(q, k, cos, sin)


@pytest.mark.parametrize(
    ("function", "variant"),
    [
        (half, "half"),
        (half_back_to_the_input_dtype, "half"),
        (partial, "half"),
        (half_tables, "half, half tables"),
        (heads_after_tokens, "half"),
        (one_tensor, "half"),
        (one_tensor_back_to_the_input_dtype, "half"),
        (interleaved, "interleaved, half tables"),
    ],
)
def test_recognised_functions_give_the_same_values_and_gradients(function: Callable[..., Any], variant: str) -> None:
    found = _rope.verify(function)
    assert found.variant == variant
    fused = _rope.replacement(function, found.settings)
    after_tokens = function is heads_after_tokens
    q, k = (torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    one = function in (one_tensor, one_tensor_back_to_the_input_dtype)
    width = 4 if function in (half_tables, partial) else 8
    for batch in (1, 2):
        cos, sin = torch.randn(2, batch, 5, width)
        for dtype in (torch.float32, torch.bfloat16):
            x = [t.transpose(1, 2) if after_tokens else t for t in (q.to(dtype), k.to(dtype))][: 1 if one else 2]
            native, patched = function(*x, cos, sin), fused(*x, cos=cos, sin=sin)
            for a, b in zip(*((y,) if one else y for y in (patched, native)), strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
                if dtype == torch.float32:
                    wanted = torch.autograd.grad(b.square().sum(), (q, k), retain_graph=True, allow_unused=True)
                    got = torch.autograd.grad(a.square().sum(), (q, k), allow_unused=True)
                    assert [g is None for g in got] == [g is None for g in wanted]
                    for g, w in zip(got, wanted, strict=True):
                        if g is not None:
                            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [negated, first_row_only, scaled_keys, with_sections])
def test_other_functions_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(_rope.Refused):
        _rope.verify(function)


@pytest.mark.parametrize(
    "arguments",
    [
        {"q": torch.ones(3, 4, 8), "k": torch.ones(3, 4, 8), "cos": torch.ones(3, 8), "sin": torch.ones(3, 8)},
        {"q": torch.ones(2, 4, 3, 8), "k": torch.ones(2, 4, 3, 8), "cos": torch.ones(3, 8), "sin": torch.ones(3, 8)},
    ],
    ids=["three axes", "tables without a batch"],
)
def test_calls_that_do_not_fit_go_to_the_native_function(arguments: dict[str, Tensor]) -> None:
    fused = _rope.replacement(heads_after_tokens, _rope.verify(heads_after_tokens).settings)
    try:
        wanted: Any = heads_after_tokens(**arguments)
    except Exception as error:
        with pytest.raises(type(error)):
            fused(**arguments)
    else:
        for a, b in zip(fused(**arguments), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def logged(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return forward(self, *args, **kwargs)

    return wrapper


LATE: list[str] = []


def late_helper(x: Tensor) -> Tensor:
    return x


class Base(nn.Module):
    def shared(self, x: Tensor) -> Tensor:
        return x


class Attention(Base):
    """A decorated forward that uses its class cell, a default and another global."""

    calls = 0

    def shared(self, x: Tensor) -> Tensor:
        return super().shared(x) + 1

    @logged
    def forward(self, q: Tensor, cos: Tensor, sin: Tensor, *, scale: float = 2.0) -> Tensor:
        q = super().shared(late_helper(q))
        q, _ = half(q, q, cos, sin)
        return q * scale


def attention_inputs() -> list[Tensor]:
    return [torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)]


def test_a_decorated_forward_with_a_class_cell_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other, inputs = Attention(), Attention(), attention_inputs()
    native, native_forward = module(*inputs), Attention.forward
    report = tigon.patch(module)
    assert [(row.form, row.verdict) for row in report] == [("rope", "replaced")]
    calls, rope = [], _rope.rope
    monkeypatch.setattr(_rope, "rope", lambda *a, **k: calls.append("rope") or rope(*a, **k))
    torch.testing.assert_close(module(*inputs), native, rtol=1e-5, atol=1e-5)
    assert (module.calls, calls) == (2, ["rope"])
    other(*inputs)
    assert (calls, Attention.forward) == (["rope"], native_forward)
    assert inspect.signature(module.forward) == inspect.signature(other.forward)


def test_the_rebuilt_forward_sees_later_changes_of_other_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Attention(), attention_inputs()
    tigon.patch(module)
    monkeypatch.setitem(globals(), "late_helper", lambda x: x * 3)
    wanted = Attention.forward(module, *inputs)
    torch.testing.assert_close(module(*inputs), wanted, rtol=1e-5, atol=1e-5)


def test_errors_point_to_the_lines_of_the_native_forward() -> None:
    module = Attention()
    tigon.patch(module)
    innermost = inspect.unwrap(module.forward.__func__)
    native = inspect.unwrap(Attention.forward)
    assert innermost.__code__.co_filename == native.__code__.co_filename
    assert list(innermost.__code__.co_lines())[-1][2] == list(native.__code__.co_lines())[-1][2]
    assert innermost.__globals__ is native.__globals__


def test_a_forward_without_source_is_refused() -> None:
    scope: dict[str, Any] = {"half": half, "nn": nn}
    exec("class A(nn.Module):\n    def forward(self, q, cos, sin):\n        return half(q, q, cos, sin)", scope)
    with pytest.warns(UserWarning, match="source of the attention forward"):
        tigon.patch(scope["A"]())


def test_a_forward_that_is_not_its_source_is_refused() -> None:
    class Changed(nn.Module):
        def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Any:
            return half(q, q, cos, sin)

    code = Changed.forward.__code__
    Changed.forward.__code__ = code.replace(co_names=("rotate_half", *code.co_names[1:]))
    Changed.forward.__globals__.setdefault("rotate_half", rotate_half)
    forward = Changed.forward
    with pytest.raises(_rope.Refused, match="not the code that runs"):
        _rope._recompiled(forward, {"half": half})


def test_a_rotary_function_that_is_a_module_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Func(nn.Module):
        def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
            return NATIVE(q, k, cos, sin, unsqueeze_dim)

    monkeypatch.setitem(globals(), "half", Func())
    module, inputs = Attention(), attention_inputs()
    native = module(*inputs)
    assert [row.verdict for row in tigon.patch(module)] == ["replaced"]
    torch.testing.assert_close(module(*inputs), native, rtol=1e-5, atol=1e-5)


NATIVE = half


@pytest.mark.parametrize("shape", ["per row", "one for all"])
def test_positions_of_each_row_reach_the_rotation(shape: str, build: Any, batch: Any) -> None:
    model = build("Llama").eval()
    positions = torch.arange(9)[None].repeat(2, 1)
    if shape == "per row":
        positions[1] += 20
    else:
        positions = positions[:1]
    inputs = {"input_ids": batch["input_ids"], "position_ids": positions}
    native = model(**inputs).logits
    tigon.patch(model)
    torch.testing.assert_close(model(**inputs).logits, native, rtol=1e-5, atol=1e-4)
