"""Rotary position embedding: semantics, layouts of memory, and what the generic tests cannot say."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops._triton import INTERPRETED
from tigon.ops.rope import rope, rope_reference

B, S, HQ, HK, D = 2, 7, 4, 2, 16


both_backends = pytest.mark.usefixtures("backend")


def angles(positions: Tensor, rotary: int) -> tuple[Tensor, Tensor]:
    """Full tables of the usual frequencies, `[..., S, R]`."""
    frequency = 10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = positions.double()[..., None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().float(), angle.sin().float()


def heads(number: int, head_dim: int = D, **options) -> Tensor:
    return torch.randn(B, S, number, head_dim, **options).transpose(1, 2)


def rotate_half_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Written over whole rows, as models do; tables `[S, R]` or `[B, S, R]`, heads on axis 1."""
    rotary = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    head, tail = x[..., :rotary], x[..., rotary:]
    swapped = torch.cat((-head[..., rotary // 2 :], head[..., : rotary // 2]), -1)
    return torch.cat((head * cos + swapped * sin, tail), -1)


# ---- values ----


@both_backends
def test_equals_the_rotate_half_formula() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    for y, x in zip(rope(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(y, rotate_half_formula(x, cos, sin), atol=5e-7, rtol=1e-6)


@both_backends
def test_angles_belong_to_the_sample() -> None:
    cos, sin = angles(torch.tensor([[0, 1, 2], [5, 6, 7]]), 4)
    ones = torch.ones(2, 1, 3, 4)
    y, _ = rope(ones, ones, cos, sin)
    expected = torch.tensor([1.242586, 0.948771, -0.675262, 1.048729])
    torch.testing.assert_close(y[1, 0, 0], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(y[0, 0, 0], torch.ones(4), atol=0, rtol=0)
    shared, _ = rope(ones, ones, cos[1:], sin[1:])
    assert torch.equal(shared[0], y[1])
    assert torch.equal(shared[1], y[1])


@both_backends
def test_part_of_the_head_turns() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 1, 4)
    cos, sin = angles(torch.tensor([3]), 2)
    y = rope(x, None, cos, sin)
    torch.testing.assert_close(y.flatten(), torch.tensor([-1.272233, -1.838865, 3.0, 4.0]), atol=1e-6, rtol=0)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_rest_of_the_head_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    rotary, head_dim = 6, 21
    q, k = heads(HQ, head_dim).to(dtype), heads(HK, head_dim).to(dtype)
    for x in (q, k):
        x[..., -5:] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7, 3.0]).to(dtype)
    cos, sin = angles(torch.arange(S), rotary)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for y, x in zip(rope(q, k, cos.to(dtype), sin.to(dtype)), (q, k), strict=True):
        assert y.dtype == dtype
        assert torch.equal(y[..., rotary:].contiguous().view(bits), x[..., rotary:].contiguous().view(bits))
        assert torch.isfinite(y[..., :rotary]).all()


@both_backends
def test_keeps_the_norm_of_each_pair() -> None:
    q = heads(HQ)
    y = rope(q, None, *angles(torch.arange(S), D))
    for whole in (q, y):
        assert whole.shape == (B, HQ, S, D)
    pair_norm = [t[..., : D // 2].square() + t[..., D // 2 :].square() for t in (q, y)]
    torch.testing.assert_close(pair_norm[1], pair_norm[0], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(q, y, atol=0.1)


@both_backends
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_opposite_angle_turns_back(layout: str) -> None:
    q = heads(HQ)
    cos, sin = (t[..., : D // 2] for t in angles(torch.arange(S), D))
    options = {"layout": layout, "tables": "half"}
    back = rope(rope(q, None, cos, sin, **options), None, cos, -sin, **options)
    torch.testing.assert_close(back, q, atol=1e-6, rtol=1e-5)


@both_backends
def test_scores_depend_on_the_distance_only() -> None:
    q, k = torch.randn(D), torch.randn(D)
    cos, sin = angles(torch.tensor([0, 3, 10, 13]), D)
    yq, yk = (t[0, 0] for t in rope(q.expand(1, 1, 4, D), k.expand(1, 1, 4, D), cos, sin))
    torch.testing.assert_close(yq[1] @ yk[0], yq[3] @ yk[2], atol=1e-5, rtol=1e-5)


@both_backends
def test_position_zero_is_the_identity() -> None:
    q, k = heads(HQ), heads(HK)
    yq, yk = rope(q, k, *angles(torch.zeros(S), D))
    assert torch.equal(yq, q)
    assert torch.equal(yk, k)


# ---- options ----


@both_backends
def test_half_tables_equal_full_tables() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    full = rope(q, k, cos, sin)
    half = rope(q, k, cos[..., : D // 2], sin[..., : D // 2], tables="half")
    assert all(torch.equal(a, b) for a, b in zip(full, half, strict=True))


@both_backends
def test_each_half_of_a_full_table_is_used() -> None:
    q = heads(1)
    cos, sin = torch.randn(S, D), torch.randn(S, D)
    y = rope(q, None, cos, sin)
    torch.testing.assert_close(y, rotate_half_formula(q, cos, sin), atol=2e-6, rtol=1e-5)


@both_backends
@pytest.mark.parametrize("rotary", [D, 6])
def test_interleaved_turns_neighbours(rotary: int) -> None:
    q = heads(HQ)
    cos, sin = (t[..., : rotary // 2] for t in angles(torch.arange(S), rotary))
    y = rope(q, None, cos, sin, layout="interleaved", tables="half")
    pairs = torch.view_as_complex(q[..., :rotary].reshape(*q.shape[:-1], rotary // 2, 2).contiguous())
    expected = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    torch.testing.assert_close(y[..., :rotary], expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(y[..., rotary:], q[..., rotary:])
    gathered = rope(q, None, cos, sin, layout="interleaved_to_half", tables="half")
    assert torch.equal(gathered[..., : rotary // 2], y[..., :rotary:2])
    assert torch.equal(gathered[..., rotary // 2 : rotary], y[..., 1:rotary:2])
    assert torch.equal(gathered[..., rotary:], q[..., rotary:])


@both_backends
@pytest.mark.parametrize("rotary", [D, 6])
def test_full_tables_of_interleaved_layouts_follow_the_result(rotary: int) -> None:
    """As models write it over whole rows, with tables that repeat nothing."""
    q = heads(HQ)
    cos, sin = torch.randn(B, 1, S, rotary), torch.randn(B, 1, S, rotary)
    even, odd = q[..., :rotary:2], q[..., 1:rotary:2]
    near, far = torch.stack((-odd, even), -1).flatten(-2), torch.cat((-odd, even), -1)
    expected = {
        "interleaved": q[..., :rotary] * cos + near * sin,
        "interleaved_to_half": torch.cat((even, odd), -1) * cos + far * sin,
    }
    for layout, turned in expected.items():
        y = rope(q, None, cos[:, 0], sin[:, 0], layout=layout)
        torch.testing.assert_close(y[..., :rotary], turned, atol=2e-6, rtol=1e-5)
        assert torch.equal(y[..., rotary:], q[..., rotary:])


@both_backends
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
@pytest.mark.parametrize("tables", ["full", "half"])
def test_inverse_is_the_negated_sine_and_tail_the_last_elements(layout: str, tables: str) -> None:
    q, k = heads(HQ), heads(HK)
    width = 6 if tables == "full" else 3
    cos, sin = torch.randn(B, S, width), torch.randn(B, S, width)
    options = {"layout": layout, "tables": tables}
    expected = rope(q[..., -6:], k[..., -6:], cos, -sin, **options)
    actual = rope(q, k, cos, sin, inverse=True, tail=True, **options)
    for y, turned, x in zip(actual, expected, (q, k), strict=True):
        assert torch.equal(y[..., -6:], turned)
        assert torch.equal(y[..., :-6], x[..., :-6])


@both_backends
def test_inverse_turns_back() -> None:
    q = heads(HQ)
    cos, sin = angles(torch.arange(S), D)
    back = rope(rope(q, None, cos, sin), None, cos, sin, inverse=True)
    torch.testing.assert_close(back, q, atol=1e-6, rtol=1e-5)


@both_backends
def test_tables_may_be_views_with_any_column_stride() -> None:
    q = heads(HQ)
    cos, sin = (t[..., : D // 2] for t in angles(torch.arange(S), D))
    options = {"layout": "interleaved", "tables": "half"}
    expected = rope(q, None, cos, sin, **options)
    repeated = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    assert torch.equal(rope(q, None, repeated[0][..., ::2], repeated[1][..., ::2], **options), expected)


@both_backends
def test_heads_on_axis_two() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S).expand(B, S) + torch.tensor([[0], [4]]), D)
    first = rope(q, k, cos, sin)
    second = rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, second, strict=True))


@both_backends
def test_one_tensor_form() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    y = rope(q, None, cos, sin)
    assert isinstance(y, Tensor)
    assert torch.equal(y, rope(q, k, cos, sin)[0])


@both_backends
@pytest.mark.parametrize(
    ("q_dtype", "k_dtype", "table_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtypes_are_those_of_the_formula(q_dtype: torch.dtype, k_dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    q, k = heads(HQ).to(q_dtype).requires_grad_(), heads(HK).to(k_dtype).requires_grad_()
    cos, sin = (t.to(table_dtype) for t in angles(torch.arange(S), D))
    out = rope(q, k, cos, sin)
    assert [y.dtype for y in out] == [rotate_half_formula(x, cos, sin).dtype for x in (q, k)]
    sum(y.float().sum() for y in out).backward()
    assert (q.grad.dtype, k.grad.dtype) == (q_dtype, k_dtype)


# ---- memory ----


def _layouts(number: int) -> dict[str, Tensor]:
    """The same values in the ways a model may hand them over."""
    x = torch.randn(B, number, S, D)
    packed = torch.full((B, S, 3 * number * D + 8), 1e4)
    middle = packed[..., number * D + 8 : 2 * number * D + 8].view(B, S, number, D).transpose(1, 2)
    middle.copy_(x)
    padded = torch.full((B, number, S, D + 4), 1e4)[..., :D]
    padded.copy_(x)
    sequence_first = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    columns = x.transpose(2, 3).contiguous().transpose(2, 3)
    tokens_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    return {
        "heads_first": x,
        "tokens_first": tokens_first,
        "packed": middle,
        "padded": padded,
        "sequence_first": sequence_first,
        "columns": columns,
        "one_head_for_all": x[:, :1].expand(B, number, S, D),
    }


@both_backends
@pytest.mark.parametrize("layout", list(_layouts(1)))
def test_any_strides(layout: str) -> None:
    q, k = _layouts(HQ)[layout], _layouts(HK)[layout]
    cos, sin = torch.randn(B, S, D), torch.randn(B, S, D)
    dq, dk = _layouts(HQ)[layout], _layouts(HK)[layout]
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    out = rope(*leaves, cos, sin)
    grads = torch.autograd.grad(out, leaves, (dq, dk))
    plain = [x.detach().contiguous().requires_grad_() for x in (q, k)]
    expected = rope(*plain, cos, sin)
    expected_grads = torch.autograd.grad(expected, plain, (dq.contiguous(), dk.contiguous()))
    for a, b in zip((*out, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first", "packed", "sequence_first"])
def test_results_are_stored_in_the_order_of_the_input(layout: str) -> None:
    q = _layouts(HQ)[layout].detach().requires_grad_()
    y = rope(q, None, *angles(torch.arange(S), D))
    # As elementwise operators of torch store theirs.
    assert y.stride() == (q.detach() + 0).stride()
    # The upstream gradient of another order does not change that of the gradient.
    (dq,) = torch.autograd.grad(y, q, torch.ones(B, HQ, S, D))
    assert dq.stride() == y.stride()


def test_kernels_read_views_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = sys.modules["tigon.ops.rope"]
    launch = module.launch

    def record(kernel, grid, *args, **constants):
        seen.append([t.data_ptr() for t in args if isinstance(t, Tensor)])
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(module, "launch", record)
    q, k = (_layouts(n)["packed"].detach().requires_grad_() for n in (HQ, HK))
    cos, sin = angles(torch.arange(S), D)
    grads = _layouts(HQ)["tokens_first"], _layouts(1)["heads_first"].expand(B, HK, S, D)
    torch.autograd.grad(rope(q, k, cos, sin), (q, k), grads)
    assert len(seen) == 2, "one launch each way"
    assert [q.data_ptr(), k.data_ptr()] == seen[0][:2]
    assert [g.data_ptr() for g in grads] == seen[1][:2]


@both_backends
def test_inputs_are_not_changed_and_results_are_new() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    before = [t.clone() for t in (q, k, cos, sin)]
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    out = rope(*leaves, cos, sin)
    upstream = [torch.randn_like(y) for y in out]
    upstream_before = [g.clone() for g in upstream]
    grads = torch.autograd.grad(out, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip((q, k, cos, sin), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(upstream, upstream_before, strict=True))
    storages = [t.untyped_storage().data_ptr() for t in (q, k, *out, *upstream, *grads)]
    assert len(set(storages)) == len(storages)


def test_only_the_tables_are_saved() -> None:
    saved = []
    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    cos, sin = angles(torch.arange(S), D)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: None):
        rope(q, k, cos, sin)
    assert saved == [cos.data_ptr(), sin.data_ptr()]


def test_offsets_beyond_two_to_the_31st() -> None:
    """Rows 2^30 elements apart, in a child process since a 32-bit offset would crash it."""
    script = """
        import torch
        from tigon.ops.rope import rope, rope_reference
        far = 2**30 + 64
        buffer = torch.empty(3 * far, dtype=torch.float16)
        cos, sin = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
        for strides in ((64, 16, far, 1), (far, 16, 64, 1), (16, far, 64, 1)):
            x = buffer.as_strided((3, 3, 3, 8), strides)
            x.copy_(torch.randn(3, 3, 3, 8))
            y = rope(x, None, cos, sin)
            torch.testing.assert_close(y, rope_reference(x.contiguous(), None, cos, sin))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- gradients ----


@pytest.mark.parametrize(
    ("layout", "tables", "head_dim", "width"),
    [
        ("half", "full", 6, 6),
        ("half", "full", 7, 4),
        ("half", "half", 6, 2),
        ("interleaved", "half", 7, 2),
        ("interleaved", "full", 7, 4),
        ("interleaved_to_half", "half", 6, 2),
        ("interleaved_to_half", "full", 6, 6),
    ],
)
def test_gradcheck_of_the_reference(layout: str, tables: str, head_dim: int, width: int) -> None:
    """Tables included: the reference gives their gradient too."""
    q, k = torch.randn(2, 2, 3, head_dim).double(), torch.randn(2, 1, 3, head_dim).double()
    cos, sin = torch.randn(2, 3, width).double(), torch.randn(2, 3, width).double()
    leaves = [t.requires_grad_() for t in (q, k, cos, sin)]
    assert torch.autograd.gradcheck(lambda *a: rope_reference(*a, layout=layout, tables=tables), leaves)


@pytest.mark.parametrize("head_dim", [D, 7])
@pytest.mark.parametrize("options", [{}, {"inverse": True, "tail": True}], ids=["plain", "inverse_tail"])
@pytest.mark.parametrize("tables", ["full", "half"])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
def test_gradients_of_each_layout(layout: str, tables: str, options: dict, head_dim: int) -> None:
    q, k = heads(HQ, head_dim).requires_grad_(), heads(HK, head_dim).requires_grad_()
    width = 6 if tables == "full" else 3
    cos, sin = torch.randn(B, S, width), torch.randn(B, S, width)
    upstream = heads(HQ, head_dim), heads(HK, head_dim)
    options = {"layout": layout, "tables": tables, **options}
    actual, expected = (
        torch.autograd.grad(function(q, k, cos, sin, **options), (q, k), upstream)
        for function in (rope, rope_reference)
    )
    torch.testing.assert_close(actual, expected, atol=2e-6, rtol=1e-5)


@both_backends
def test_backward_of_a_sum() -> None:
    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    cos, sin = torch.randn(S, D), torch.randn(S, D)
    sum(y.sum() for y in rope(q, k, cos, sin)).backward()
    half = D // 2
    dx1 = cos[:, :half] + sin[:, half:]
    dx2 = cos[:, half:] - sin[:, :half]
    expected = torch.cat((dx1, dx2), -1)
    for x in (q, k):
        torch.testing.assert_close(x.grad, expected.expand_as(x), atol=1e-6, rtol=1e-5)


@both_backends
def test_gradients_of_what_is_used_only() -> None:
    cos, sin = angles(torch.arange(S), D)
    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    _, yk = rope(q, k, cos, sin)
    dq, dk = torch.autograd.grad(yk.sum(), (q, k), allow_unused=True)
    assert dq is None or not dq.any()
    assert dk.any()
    for wanted in (0, 1):
        x = [heads(HQ), heads(HK)]
        x[wanted].requires_grad_()
        y = rope(*x, cos, sin)
        assert [t.requires_grad for t in y] == [wanted == 0, wanted == 1]
        assert torch.autograd.grad(y[wanted].sum(), x[wanted])[0].shape == x[wanted].shape


def test_tables_that_need_a_gradient_get_one() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = (t.requires_grad_() for t in angles(torch.arange(S), D))
    reasons = tigon.why_not("rope", q, k, cos, sin)
    assert reasons == ["cos or sin requires a gradient, which only the reference computes"]
    rope(q, k, cos, sin)[0].sum().backward()
    torch.testing.assert_close(cos.grad, q.sum((0, 1)), atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        assert tigon.why_not("rope", q, k, cos, sin) == []


@both_backends
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    """q feeds a second branch, which an in-place rotation would spoil."""
    cos, sin = angles(torch.arange(S), D)

    def block(q: Tensor, k: Tensor) -> Tensor:
        yq, yk = rope(q, k, cos, sin)
        return (yq @ yk.repeat_interleave(HQ // HK, 1).transpose(2, 3)).sum() + (q * q).sum()

    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    plain = torch.autograd.grad(block(q, k), (q, k))
    loss = checkpoint(block, q, k, use_reentrant=use_reentrant)
    loss.backward()
    assert torch.equal(q.grad, plain[0])
    assert torch.equal(k.grad, plain[1])


# ---- compiler ----


@both_backends
@pytest.mark.parametrize("with_k", [True, False])
def test_one_graph_for_all_lengths(with_k: bool) -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def function(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        out = rope(q.transpose(1, 2), None if k is None else k.transpose(1, 2), cos, sin)
        return (out,) if isinstance(out, Tensor) else out

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
    # No two sizes alike in the first call, or the compiler takes them for the same size for ever.
    for batch, length in ((3, 9), (5, 6), (3, 33)):
        q = torch.randn(batch, length, HQ, D, requires_grad=True)
        k = torch.randn(batch, length, HK, D, requires_grad=True) if with_k else None
        cos, sin = angles(torch.arange(length).expand(batch, length), D)
        leaves = [x for x in (q, k) if x is not None]
        actual, expected = compiled(q, k, cos, sin), function(q, k, cos, sin)
        upstream = [torch.randn_like(y) for y in expected]
        actual += torch.autograd.grad(actual, leaves, upstream)
        expected += torch.autograd.grad(expected, leaves, upstream)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
    assert graphs.frame_count == 1


def test_operator_is_registered_rightly() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    orders, dtypes = ([0, 2, 1, 3], [0, 1, 2, 3]), (torch.float32, torch.float32)
    rotate = torch.ops.tigon.rope_rotate.default
    options = ("half", "full", 1, False, False, None, False)
    torch.library.opcheck(rotate, (q, k, cos, sin, None, *options, *orders, *dtypes))
    torch.library.opcheck(rotate, (q, None, cos, sin, torch.arange(S), *options, *orders, *dtypes))


def test_packed_sequences_take_the_rows_of_their_positions(device: torch.device) -> None:
    lengths = (3, 5, 1)
    position_ids = torch.cat([torch.arange(n) for n in lengths])
    q, k = torch.randn(1, 2, 9, 8, device=device), torch.randn(1, 1, 9, 8, device=device)
    cos, sin = (t.to(device) for t in angles(torch.arange(16), 8))
    packed = tigon.rope(q, k, cos, sin, position_ids=position_ids.to(device))
    for x, y in zip((q, k), packed, strict=True):
        start = 0
        for n in lengths:
            alone = tigon.rope(x[:, :, start : start + n], None, cos[:n], sin[:n])
            torch.testing.assert_close(y[:, :, start : start + n], alone, rtol=0, atol=0)
            start += n


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", [(S,), (1, S), (2, S)])
def test_position_ids_are_rows(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    q, k = (torch.randn(2, h, S, 8, device=device, requires_grad=True) for h in (3, 1))
    cos, sin = torch.randn(20, 8, device=device), torch.randn(20, 8, device=device)
    position_ids = torch.randint(0, 20, shape, dtype=dtype, device=device)
    rows = position_ids.long()
    actual = tigon.rope(q, k, cos, sin, position_ids=position_ids)
    expected = tigon.rope(q, k, cos[rows], sin[rows])
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    upstream = [torch.randn_like(y) for y in expected]
    gradients = (torch.autograd.grad(y, (q, k), upstream) for y in (actual, expected))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tables", ["full", "half"])
@pytest.mark.parametrize("sections", [(4,), (1, 3), (1, 1, 2), (1, 1, 1, 1)])
def test_sections_take_their_own_table(tables: str, sections: tuple[int, ...], device: torch.device) -> None:
    q, k = (torch.randn(2, h, 5, 10, device=device, requires_grad=True) for h in (3, 1))
    cos, sin = (torch.randn(len(sections), 2, 5, 8 if tables == "full" else 4, device=device) for _ in range(2))
    plane = [i for i, n in enumerate(sections) for _ in range(n)] * (2 if tables == "full" else 1)
    merged = [torch.stack([t[p, ..., c] for c, p in enumerate(plane)], -1) for t in (cos, sin)]
    actual = tigon.rope(q, k, cos, sin, tables=tables, sections=sections)
    expected = tigon.rope(q, k, *merged, tables=tables)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    upstream = [torch.randn_like(y) for y in expected]
    gradients = (torch.autograd.grad(y, (q, k), upstream) for y in (actual, expected))
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_ids": torch.tensor([0, 1, 20])}, "rope: position_ids: expected rows from 0 to 19, got 0 to 20"),
        ({"position_ids": torch.tensor([-1, 1, 2])}, "rope: position_ids: expected rows from 0 to 19, got -1 to 2"),
        ({"position_ids": torch.zeros(4, dtype=torch.int64)}, r"rope: position_ids: expected \(3,\), got \(4,\)"),
        ({"position_ids": torch.zeros(3)}, "rope: position_ids: expected an integer dtype, got torch.float32"),
        ({"position_ids": torch.zeros(3, dtype=torch.bool)}, "rope: position_ids: expected an integer dtype"),
        ({"sections": (2, 2)}, r"rope: cos: expected four axes together with sections, got \(20, 8\)"),
        (
            {"position_ids": torch.arange(3), "sections": (2, 2)},
            "rope: sections: expected None together with position_ids",
        ),
    ],
)
def test_bad_rows_are_named(options: dict[str, object], message: str) -> None:
    q, table = torch.randn(1, 2, 3, 8), torch.randn(20, 8)
    with pytest.raises(ValueError, match=message):
        tigon.rope(q, None, table, table, **options)


@pytest.mark.parametrize("sections", [(2, 1), (5, -1), (2, 2.0), ()])
def test_sections_add_up_to_the_pairs(sections: tuple[float, ...]) -> None:
    q, table = torch.randn(1, 2, 3, 8), torch.randn(max(len(sections), 1), 1, 3, 8)
    with pytest.raises(ValueError, match=r"rope: (sections: expected up to four numbers of pairs, in sum 4|cos)"):
        tigon.rope(q, None, table, table, sections=sections)  # type: ignore[arg-type]


def test_a_row_outside_the_tables_is_nan_in_the_kernel(device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 or --device cuda")
    module = importlib.import_module("tigon.ops.rope")
    q, table = torch.randn(1, 2, 3, 8, device=device), torch.randn(20, 8, device=device)
    position_ids = torch.tensor([0, 20, -1], device=device)
    options = ("half", "full", 1, False, False, None, False, [0, 1, 2, 3], [], q.dtype, q.dtype)
    y, _ = module._rotate(q, None, table, table, position_ids, *options)
    assert not y[:, :, 0].isnan().any()
    assert y[:, :, 1:].isnan().all()


# ---- sizes ----


@both_backends
@pytest.mark.parametrize(
    ("batch", "length", "q_heads", "k_heads"), [(0, 5, 4, 2), (2, 0, 4, 2), (2, 5, 0, 2), (2, 5, 4, 0)]
)
def test_empty(batch: int, length: int, q_heads: int, k_heads: int) -> None:
    q = torch.randn(batch, q_heads, length, D, requires_grad=True)
    k = torch.randn(batch, k_heads, length, D, requires_grad=True)
    cos, sin = torch.randn(length, D), torch.randn(length, D)
    yq, yk = rope(q, k, cos, sin)
    expected = rope_reference(q, k, cos, sin)
    torch.testing.assert_close((yq, yk), expected, atol=1e-6, rtol=1e-6)
    (yq.sum() + yk.sum()).backward()
    assert (q.grad.shape, k.grad.shape) == (q.shape, k.shape)


@both_backends
def test_one_token_equals_that_token_of_a_sequence() -> None:
    q, k = heads(HQ), heads(HK)
    cos, sin = angles(torch.arange(S), D)
    whole = rope(q, k, cos, sin)
    last = rope(q[:, :, -1:], k[:, :, -1:], cos[-1:], sin[-1:])
    assert all(torch.equal(a[:, :, -1:], b) for a, b in zip(whole, last, strict=True))


@both_backends
@pytest.mark.parametrize("number", [1, 3, 8])
@pytest.mark.parametrize("head_dim", [2, 48, 80, 96, 256])
def test_head_dims_and_counts_that_are_no_powers_of_two(number: int, head_dim: int) -> None:
    q, k = torch.randn(1, number, 3, head_dim), torch.randn(1, 3, 3, head_dim)
    cos, sin = torch.randn(3, head_dim), torch.randn(3, head_dim)
    torch.testing.assert_close(rope(q, k, cos, sin), rope_reference(q, k, cos, sin), atol=2e-6, rtol=1e-5)


def test_heads_too_wide_for_a_program_go_to_the_reference() -> None:
    q = torch.randn(1, 1, 1, 4096)
    cos, sin = torch.randn(1, 2), torch.randn(1, 2)
    assert tigon.why_not("rope", q, None, cos, sin) == ["the head dim is above 2048"]
    assert torch.equal(rope(q, None, cos, sin)[..., 2:], q[..., 2:])


# ---- errors ----

_GOOD = {"q": (2, 4, 5, 8), "k": (2, 2, 5, 8), "cos": (5, 8), "sin": (5, 8)}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (4, 5, 8)}, {}, r"rope: q: expected four axes, got \(4, 5, 8\)"),
        ({"k": (2, 2, 6, 8)}, {}, r"rope: k: expected \(2, 2, 5, 8\), got \(2, 2, 6, 8\)"),
        ({"k": (1, 2, 5, 8)}, {}, r"rope: k: expected \(2, 2, 5, 8\)"),
        ({"k": (2, 2, 5, 6)}, {}, r"rope: k: expected \(2, 2, 5, 8\)"),
        ({"k": (2, 5, 8)}, {}, r"rope: k: expected"),
        ({"cos": (8,), "sin": (8,)}, {}, r"rope: cos: expected two or three axes"),
        ({"cos": (2, 1, 5, 8), "sin": (2, 1, 5, 8)}, {}, r"rope: cos: expected two or three axes"),
        ({"cos": (4, 8), "sin": (4, 8)}, {}, r"rope: cos: expected \(5, 8\), got \(4, 8\)"),
        ({"cos": (6, 8), "sin": (6, 8)}, {}, r"rope: cos: expected \(5, 8\), got \(6, 8\)"),
        ({"cos": (1, 1, 8), "sin": (1, 1, 8)}, {}, r"rope: cos: expected \(5, 8\), got \(1, 1, 8\)"),
        ({"cos": (3, 5, 8), "sin": (3, 5, 8)}, {}, r"rope: cos: expected \(2, 5, 8\), got \(3, 5, 8\)"),
        ({"cos": (5, 7), "sin": (5, 7)}, {}, r"rope: cos: expected an even number of columns .* got 7"),
        ({"cos": (5, 10), "sin": (5, 10)}, {}, r"rope: cos: expected a rotary width .* got 10"),
        ({"cos": (5, 0), "sin": (5, 0)}, {}, r"rope: cos: expected a rotary width .* got 0"),
        ({}, {"tables": "half"}, r"rope: cos: expected a rotary width .* got 16"),
        ({"sin": (5, 6)}, {}, r"rope: sin: expected \(5, 8\), got \(5, 6\)"),
        ({"sin": (1, 5, 8)}, {}, r"rope: sin: expected \(5, 8\), got \(1, 5, 8\)"),
        ({}, {"layout": "pairs"}, r"rope: layout: expected one of 'half'"),
        ({}, {"tables": "both"}, r"rope: tables: expected one of 'full', 'half', got 'both'"),
        ({}, {"unsqueeze_dim": 0}, r"rope: unsqueeze_dim: expected one of 1, 2, got 0"),
        ({}, {"unsqueeze_dim": 2}, r"rope: k: expected \(2, 4, 5, 8\), got \(2, 2, 5, 8\)"),
    ],
)
def test_errors_state_what_was_expected(shapes: dict, options: dict, message: str) -> None:
    tensors = {name: torch.randn(shape) for name, shape in {**_GOOD, **shapes}.items()}
    with pytest.raises(ValueError, match=message):
        rope(**tensors, **options)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda t: t.long(), r"rope: q: expected a floating-point dtype, got torch.int64"),
        ("k", lambda t: t.long(), r"rope: k: expected a floating-point dtype"),
        ("sin", lambda t: t.half(), r"rope: sin: expected torch.float32, got torch.float16"),
        ("k", lambda t: t.to("meta"), r"rope: k: expected device cpu, got meta"),
        ("sin", lambda t: t.to("meta"), r"rope: sin: expected device cpu, got meta"),
    ],
)
def test_errors_of_dtypes_and_devices(name: str, change, message: str) -> None:
    tensors = {key: torch.randn(shape) for key, shape in _GOOD.items()}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        rope(**tensors)
