"""Rotary functions: which are recognised, and that one instance's forward is all that changes."""

from __future__ import annotations

import functools
import inspect
import itertools
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


def rotate_pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def interleaved_full(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    q_rot, k_rot = q.float() * cos + rotate_pairs(q.float()) * sin, k.float() * cos + rotate_pairs(k.float()) * sin
    return q_rot.to(q.dtype), k_rot.to(k.dtype)


def pairs_apart(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> Any:
    """Neighbours turn and come out as halves; of the tables the first half is read."""
    cos, sin = (t[..., : t.shape[-1] // 2].unsqueeze(unsqueeze_dim) for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    return rotate(q), rotate(k)


def pairs_apart_then_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    def apart(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    return half(apart(q), apart(k), cos, sin, unsqueeze_dim)


def sin_first(tensor: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin, cos = (t.repeat_interleave(2, -1).unsqueeze(2) for t in (sin, cos))
    return tensor * cos + rotate_pairs(tensor) * sin


def complex_table(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(-2).type_as(x)

    return rotate(xq), rotate(xk)


def conjugate_table(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    return complex_table(xq, xk, freqs_cis.conj())


def last_columns(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    cos, sin = (t.repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    rest, turned = x[..., : -cos.shape[-1]], x[..., -cos.shape[-1] :]
    return torch.cat((rest, (turned.float() * cos + rotate_pairs(turned).float() * sin).to(x.dtype)), -1)


def sin_of_the_other_element(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Right for tables that repeat their halves only."""
    return half(q, k, cos, sin.roll(sin.shape[-1] // 2, -1), unsqueeze_dim)


def mixed_up_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(q, k, sin, cos, unsqueeze_dim)


def transposed_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """The inverse with the halves of sin swapped, which does not show where they are equal."""
    return half(q, k, cos, -sin.roll(sin.shape[-1] // 2, -1), unsqueeze_dim)


def doubled_frequencies(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    return complex_table(xq, xk, freqs_cis * freqs_cis)


def detached_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(q, k.detach() + 0 * k, cos, sin, unsqueeze_dim)


def first_row_only(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return half(q, k, cos[:1], sin[:1], unsqueeze_dim)


def scaled_keys(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    y = half(q, k, cos, sin, unsqueeze_dim)
    return y[0], y[1] * 1.01


def with_sections(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sections: Any = (1, 1)) -> Any:
    return half(q, k, cos, sin)


# Function, variant, axis of the heads, width of the tables for heads of 8.
RECOGNISED = [
    (half, "half", 1, 8),
    (half_back_to_the_input_dtype, "half", 1, 8),
    (partial, "half", 1, 4),
    (half_tables, "half, half tables", 1, 4),
    (heads_after_tokens, "half", 2, 8),
    (one_tensor, "half", 1, 8),
    (one_tensor_back_to_the_input_dtype, "half", 1, 8),
    (negated, "half, inverse", 1, 8),
    (interleaved, "interleaved, half tables", 1, 8),
    (interleaved_full, "interleaved", 1, 8),
    (pairs_apart, "interleaved_to_half", 1, 8),
    (pairs_apart_then_half, "interleaved_to_half, full tables", 1, 8),
    (sin_first, "interleaved, half tables", 2, 4),
    (complex_table, "interleaved, half tables", 1, 4),
    (conjugate_table, "interleaved, half tables, inverse", 1, 4),
    (last_columns, "interleaved, half tables, tail", 1, 2),
]


@pytest.mark.parametrize(("function", "variant", "axis", "width"), RECOGNISED, ids=lambda v: getattr(v, "__name__", ""))
def test_recognised_functions_give_the_same_values_and_gradients(
    function: Callable[..., Any], variant: str, axis: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _rope.verify(function)
    assert found.variant == variant
    fused = _rope.replacement(function, found.settings)
    calls, rope = [], _rope.rope
    monkeypatch.setattr(_rope, "rope", lambda *a, **k: calls.append("rope") or rope(*a, **k))
    names = list(inspect.signature(function).parameters)
    count = names.index("freqs_cis") if "freqs_cis" in names else min(names.index("cos"), names.index("sin"))
    leaves = [torch.randn(2, heads, 5, 8, requires_grad=True) for heads in (4, 2)][:count]
    for batch, dtype in itertools.product((1, 2), (torch.float32, torch.bfloat16)):
        tables = {"cos": torch.randn(batch, 5, width), "sin": torch.randn(batch, 5, width)}
        tables["freqs_cis"] = torch.complex(tables["cos"], tables["sin"])
        tables = {name: table for name, table in tables.items() if name in names}
        x = [t.to(dtype).transpose(1, 2) if axis == 2 else t.to(dtype) for t in leaves]
        native, patched = function(*x, **tables), fused(*x, **tables)
        for a, b in zip(*((y,) if count == 1 else y for y in (patched, native)), strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)
            if dtype == torch.float32:
                wanted = torch.autograd.grad(b.square().sum(), leaves, retain_graph=True, allow_unused=True)
                got = torch.autograd.grad(a.square().sum(), leaves, allow_unused=True)
                assert [g is None for g in got] == [g is None for g in wanted]
                for g, w in zip(got, wanted, strict=True):
                    if g is not None:
                        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    assert len(calls) == 4


@pytest.mark.parametrize(
    "function",
    [
        first_row_only,
        scaled_keys,
        with_sections,
        sin_of_the_other_element,
        mixed_up_tables,
        transposed_back,
        doubled_frequencies,
        detached_keys,
    ],
)
def test_other_functions_are_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(_rope.Refused):
        _rope.verify(function)


@pytest.mark.parametrize(("function", "variant", "axis", "width"), RECOGNISED, ids=lambda v: getattr(v, "__name__", ""))
def test_no_other_candidate_agrees_with_a_function(
    function: Callable[..., Any], variant: str, axis: int, width: int
) -> None:
    """The probe tells all candidates apart that differ on tensors the function takes."""
    settings = _rope.verify(function).settings
    names = list(inspect.signature(function).parameters)
    arguments = _rope._arguments(function)
    others = [
        settings._replace(inverse=not settings.inverse),
        settings._replace(layout="half" if settings.layout != "half" else "interleaved"),
        settings._replace(layout="interleaved_to_half" if settings.layout != "interleaved_to_half" else "half"),
        settings._replace(keeps_dtype=not settings.keeps_dtype),
    ]
    generator = torch.Generator().manual_seed(3)
    says_axis = "unsqueeze_dim" in names
    for other in others:
        left = [other]
        for each, size in itertools.product((1, 2), (16, 8, 4)):
            tensors = _rope._draw(generator, each, size, 2)
            left = _rope._Case(function, arguments, says_axis, each, tensors, generator).surviving(left)
        assert left == [], other


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


def test_tables_of_a_length_or_a_batch_that_only_broadcasting_takes_go_to_the_native_function() -> None:
    fused = _rope.replacement(half, _rope.verify(half).settings)
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    for shape in ((2, 3, 8), (1, 1, 8)):
        cos, sin = torch.randn(2, *shape)
        for a, b in zip(fused(q, k, cos, sin), half(q, k, cos, sin), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


class InlineRotation(nn.Module):
    """Its rotation is a method, which is no function that could be replaced."""

    @staticmethod
    def apply_rotary(angles: Tensor, q: Tensor) -> Tensor:
        return q * angles.cos()

    def forward(self, q: Tensor, angles: Tensor) -> Tensor:
        return self.apply_rotary(angles, q)


def test_a_rotation_that_is_a_method_is_kept_and_says_so() -> None:
    with pytest.warns(UserWarning, match="replaced nothing"):
        (row,) = tigon.patch(InlineRotation()).rows
    assert (row.form, row.verdict) == ("rope", "kept")
    assert "the method apply_rotary of its class" in row.reason


class Either(nn.Module):
    """One forward, two rotary functions, of which an option chooses."""

    apart = False

    def forward(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.apart:
            q, _ = pairs_apart(q, q, cos, sin)
        else:
            q, _ = half(q, q, cos, sin)
        return q


@pytest.mark.parametrize("apart", [False, True])
def test_both_functions_of_a_forward_are_replaced(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = Either(), attention_inputs()
    module.apart = apart
    native = module(*inputs)
    (row,) = tigon.patch(module).rows
    assert (row.verdict, row.variant) == ("replaced", "interleaved_to_half; half")
    layouts, rope = [], _rope.rope
    monkeypatch.setattr(_rope, "rope", lambda *a, **k: layouts.append(k["layout"]) or rope(*a, **k))
    torch.testing.assert_close(module(*inputs), native, rtol=1e-5, atol=1e-5)
    assert layouts == ["interleaved_to_half" if apart else "half"]


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
