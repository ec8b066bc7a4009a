"""Norms and rotation of queries and keys in one: what the generic checks cannot say of `qk_norm_rope`."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tigon
from tigon.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from tigon.specs import Make, all_specs

B, S, HQ, HK, D = 2, 7, 3, 2, 16
MODULE = "tigon.ops.qk_norm_rope"


both_backends = pytest.mark.usefixtures("backend")


def heads(number: int, head_dim: int = D, **options: Any) -> Tensor:
    return torch.randn(B, S, number, head_dim, **options).transpose(1, 2)


def angles(positions: Tensor, rotary: int = D) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = positions.double()[..., None] * frequency
    angle = torch.cat((angle, angle), -1)
    return angle.cos().float(), angle.sin().float()


def weights(head_dim: int = D) -> tuple[Tensor, Tensor]:
    return torch.randn(head_dim), torch.randn(head_dim)


def as_models_write_it(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float = 1e-6) -> Tensor:
    """Norm of a head, then the rotate-half formula over whole rows; tables `[S, R]`, heads on axis 1."""
    x = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    rotary = cos.shape[-1]
    head, tail = x[..., :rotary], x[..., rotary:]
    swapped = torch.cat((-head[..., rotary // 2 :], head[..., : rotary // 2]), -1)
    return torch.cat((head * cos + swapped * sin, tail), -1)


def gradients(function: Any, leaves: list[Tensor], *tables: Tensor, upstream: Any = None, **options: Any) -> Any:
    """Results, and gradients of the leaves."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = function(*leaves, *tables, **options)
    upstream = [torch.ones_like(y) for y in out] if upstream is None else upstream
    return (*out, *torch.autograd.grad(out, leaves, upstream))


# ---- values ----


@both_backends
@pytest.mark.parametrize("rotary", [D, 6])
def test_is_what_models_write(rotary: int) -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    cos, sin = angles(torch.arange(S), rotary)
    upstream = heads(HQ), heads(HK)
    actual = gradients(qk_norm_rope, [q, k, wq, wk], cos, sin, upstream=upstream)
    expected = gradients(
        lambda q, k, wq, wk, cos, sin: (as_models_write_it(q, wq, cos, sin), as_models_write_it(k, wk, cos, sin)),
        [q, k, wq, wk],
        cos,
        sin,
        upstream=upstream,
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@both_backends
def test_known_value() -> None:
    """x = (3, 4): rstd = 1 / sqrt(12.5); a quarter turn takes (a, b) to (-b, a)."""
    x = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2)
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    yq, yk = qk_norm_rope(x, 2 * x, torch.tensor([1.0, 10.0]), torch.tensor([2.0, 1.0]), zero, one, eps=0.0)
    rstd = 12.5**-0.5
    torch.testing.assert_close(yq.flatten(), torch.tensor([-40 * rstd, 3 * rstd]), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(yk.flatten(), torch.tensor([-4 * rstd, 6 * rstd]), atol=1e-6, rtol=1e-6)


@both_backends
@pytest.mark.parametrize("cast", ["cast_then_scale", "scale_then_cast", "cast_rstd", "cast_to_weight", "none"])
@pytest.mark.parametrize("layout", ["half", "interleaved", "interleaved_to_half"])
def test_is_the_norm_and_then_the_rotation(cast: str, layout: str) -> None:
    q, k, (wq, wk) = heads(HQ, 20), heads(HK, 20), weights(20)
    cos, sin = torch.randn(B, S, 6), torch.randn(B, S, 6)
    options = {"offset": 1.0, "cast": cast, "eps": 1e-3}

    def in_turn(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> Any:
        normed = tigon.rms_norm(q, wq, **options), tigon.rms_norm(k, wk, **options)
        return tigon.rope(*normed, cos, sin, layout=layout)

    upstream = heads(HQ, 20), heads(HK, 20)
    actual = gradients(qk_norm_rope, [q, k, wq, wk], cos, sin, upstream=upstream, layout=layout, **options)
    expected = gradients(in_turn, [q, k, wq, wk], cos, sin, upstream=upstream)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@both_backends
def test_scale_of_a_head_does_not_matter() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    tables = angles(torch.arange(S))
    scale = torch.rand(B, HQ, S, 1) * 100 + 1
    torch.testing.assert_close(
        qk_norm_rope(q * scale, k, wq, wk, *tables, eps=0.0)[0],
        qk_norm_rope(q, k, wq, wk, *tables, eps=0.0)[0],
        atol=1e-5,
        rtol=1e-5,
    )


@both_backends
def test_heads_without_scale_have_the_norm_of_their_size() -> None:
    q, k = heads(HQ), heads(HK)
    for y in qk_norm_rope(q, k, None, None, *angles(torch.arange(S)), eps=0.0):
        torch.testing.assert_close(y.square().mean(-1), torch.ones(y.shape[:-1]), atol=1e-5, rtol=1e-5)


@both_backends
def test_gradient_is_orthogonal_to_the_head() -> None:
    """Nothing changes when a head is scaled, so the slope along it is zero without an eps."""
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    upstream = heads(HQ), heads(HK)
    *_, dq, dk, _, _ = gradients(qk_norm_rope, [q, k, wq, wk], *angles(torch.arange(S)), upstream=upstream, eps=0.0)
    for x, dx in ((q, dq), (k, dk)):
        slope = (x * dx).sum(-1)
        torch.testing.assert_close(slope, torch.zeros_like(slope), atol=2e-5, rtol=0)
        assert dx.abs().max() > 0.1


@both_backends
def test_rows_of_zeros_have_finite_results() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    q[:, :, 2] = 0
    for t in gradients(qk_norm_rope, [q, k, wq, wk], *angles(torch.arange(S))):
        assert t.isfinite().all()


@pytest.mark.parametrize("length", [1, 33, 65])
def test_rows_past_the_end_add_nothing_without_an_eps(length: int) -> None:
    """They are rows of zeros, whose rstd is infinite without an eps."""
    q, k = torch.randn(1, 2, length, 24), torch.randn(1, 1, length, 24)
    leaves = [q, k, *weights(24)]
    tables = torch.randn(length, 12), torch.randn(length, 12)
    actual = gradients(qk_norm_rope, leaves, *tables, eps=0.0, tables="half")
    expected = gradients(qk_norm_rope_reference, leaves, *tables, eps=0.0, tables="half")
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-5, rtol=1e-5)


# ---- options ----


@both_backends
def test_half_tables_equal_full_tables() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    cos, sin = angles(torch.arange(S))
    full = qk_norm_rope(q, k, wq, wk, cos, sin)
    half = qk_norm_rope(q, k, wq, wk, cos[..., : D // 2], sin[..., : D // 2], tables="half")
    assert all(torch.equal(a, b) for a, b in zip(full, half, strict=True))


@both_backends
def test_heads_on_axis_two() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    cos, sin = angles(torch.arange(S).expand(B, S) + torch.tensor([[0], [4]]))
    first = qk_norm_rope(q, k, wq, wk, cos, sin)
    second = qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), wq, wk, cos, sin, unsqueeze_dim=2)
    assert all(torch.equal(a, b.transpose(1, 2)) for a, b in zip(first, second, strict=True))


@both_backends
@pytest.mark.parametrize("cast", ["cast_then_scale", "scale_then_cast", "cast_to_weight", "none"])
@pytest.mark.parametrize(
    ("x_dtype", "weight_dtype", "table_dtype"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.float16, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes(cast: str, x_dtype: torch.dtype, weight_dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    leaves = [heads(HQ).to(x_dtype), heads(HK).to(x_dtype), *(w.to(weight_dtype) for w in weights())]
    tables = [t.to(table_dtype) for t in angles(torch.arange(S))]
    y, _, *grads = gradients(qk_norm_rope, leaves, *tables, cast=cast)
    normed = tigon.rms_norm(leaves[0], leaves[2], cast=cast).dtype
    assert y.dtype == torch.promote_types(normed, table_dtype)
    assert [g.dtype for g in grads] == [x_dtype, x_dtype, weight_dtype, weight_dtype]


def test_one_rounding_at_the_end_is_nearer_than_one_after_each_step() -> None:
    """fp16, which the interpreter rounds rightly."""
    q, k, (wq, wk) = heads(HQ).half(), heads(HK).half(), (w.half() for w in weights())
    tables = [t.half() for t in angles(torch.arange(S))]
    exact = qk_norm_rope_reference(*(t.double() for t in (q, k, wq, wk, *tables)))
    errors = {
        f.__name__: [(a - e).square().mean() for a, e in zip(f(q, k, wq, wk, *tables, cast="none"), exact, strict=True)]
        for f in (qk_norm_rope, qk_norm_rope_reference)
    }
    assert all(a < b for a, b in zip(*errors.values(), strict=True))


# ---- memory ----


def _layouts(number: int) -> dict[str, Tensor]:
    """The same values in the ways a model may hand them over."""
    x = torch.randn(B, number, S, D)
    packed = torch.full((B, S, 3 * number * D + 8), 1e4)
    middle = packed[..., number * D + 8 : 2 * number * D + 8].view(B, S, number, D).transpose(1, 2)
    middle.copy_(x)
    return {
        "heads_first": x,
        "tokens_first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": middle,
        "sequence_first": x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
        "columns": x.transpose(2, 3).contiguous().transpose(2, 3),
        "one_head_for_all": x[:, :1].expand(B, number, S, D),
    }


@both_backends
@pytest.mark.parametrize("layout", list(_layouts(1)))
def test_any_strides(layout: str) -> None:
    leaves = [_layouts(HQ)[layout], _layouts(HK)[layout], *weights()]
    cos, sin = torch.randn(B, S, D), torch.randn(B, S, 2 * D)[..., ::2]
    upstream = _layouts(HQ)[layout], _layouts(HK)[layout]
    actual = gradients(qk_norm_rope, leaves, cos, sin, upstream=upstream)
    expected = gradients(
        qk_norm_rope,
        [x.contiguous() for x in leaves],
        cos,
        sin.contiguous(),
        upstream=[g.contiguous() for g in upstream],
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", ["heads_first", "tokens_first", "packed", "sequence_first"])
def test_results_are_stored_in_the_order_of_the_input(layout: str) -> None:
    q, k = _layouts(HQ)[layout], _layouts(HK)[layout]
    upstream = torch.ones(B, HQ, S, D), torch.ones(B, HK, S, D)
    yq, yk, dq, dk, *_ = gradients(qk_norm_rope, [q, k, *weights()], *angles(torch.arange(S)), upstream=upstream)
    # As elementwise operators of torch store theirs, whatever the order of the upstream gradient.
    assert yq.stride() == dq.stride() == (q + 0).stride()
    assert yk.stride() == dk.stride() == (k + 0).stride()


def test_one_launch_each_way_and_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    module = sys.modules[MODULE]
    launch = module.launch

    def record(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        seen.append([t.data_ptr() for t in args if isinstance(t, Tensor)])
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(module, "launch", record)
    q, k, (wq, wk) = _layouts(HQ)["packed"], _layouts(HK)["packed"], weights()
    cos, sin = angles(torch.arange(S))
    upstream = _layouts(HQ)["tokens_first"], _layouts(1)["heads_first"].expand(B, HK, S, D)
    gradients(qk_norm_rope, [q, k, wq, wk], cos, sin, upstream=upstream)
    assert len(seen) == 2
    inputs = [t.data_ptr() for t in (q, k, wq, wk)]
    assert seen[0][:4] == inputs
    assert seen[1][:6] == inputs + [g.data_ptr() for g in upstream]


def test_only_inputs_are_saved() -> None:
    saved = []
    leaves = [heads(HQ).requires_grad_(), heads(HK).requires_grad_(), *(w.requires_grad_() for w in weights())]
    tables = angles(torch.arange(S))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: None):
        qk_norm_rope(*leaves, *tables)
    assert saved == [t.data_ptr() for t in (*leaves, *tables)]


def test_offsets_beyond_two_to_the_31st() -> None:
    """Rows 2^30 elements apart, in a child process since a 32-bit offset would crash it."""
    script = """
        import torch
        from tigon.ops.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
        far = 2**30 + 64
        buffer = torch.empty(3 * far, dtype=torch.float16)
        tables = torch.randn(3, 3, 8), torch.randn(3, 3, 8)
        for strides in ((64, 16, far, 1), (far, 16, 64, 1), (16, far, 64, 1)):
            x = buffer.as_strided((3, 3, 3, 8), strides)
            x.copy_(torch.randn(3, 3, 3, 8))
            y, _ = qk_norm_rope(x, x, None, None, *tables)
            expected, _ = qk_norm_rope_reference(x.contiguous(), x.contiguous(), None, None, *tables)
            # One fp16 rounding fewer than the reference.
            torch.testing.assert_close(y, expected, atol=4e-3, rtol=4e-3)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


# ---- gradients ----


@both_backends
def test_gradients_of_what_is_used_only() -> None:
    tables = angles(torch.arange(S))
    leaves = [t.requires_grad_() for t in (heads(HQ), heads(HK), *weights())]
    _, yk = qk_norm_rope(*leaves, *tables)
    dq, dk, dwq, dwk = torch.autograd.grad(yk.sum(), leaves, allow_unused=True)
    assert dq is None or not dq.any()
    assert dwq is None or not dwq.any()
    assert dk.any()
    assert dwk.any()


@both_backends
@pytest.mark.parametrize("wanted", range(4), ids=["q", "k", "q_weight", "k_weight"])
def test_only_the_half_that_needs_a_gradient_has_one(wanted: int) -> None:
    leaves = [heads(HQ), heads(HK), *weights()]
    leaves[wanted].requires_grad_()
    out = qk_norm_rope(*leaves, *angles(torch.arange(S)))
    assert [y.requires_grad for y in out] == [wanted % 2 == 0, wanted % 2 == 1]
    assert torch.autograd.grad(out[wanted % 2].sum(), leaves[wanted])[0].shape == leaves[wanted].shape


def test_frozen_weights_cost_no_partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training of adapters: nothing but dq and dk is computed."""
    seen: list[dict[str, Any]] = []
    module = sys.modules[MODULE]
    launch = module.launch
    monkeypatch.setattr(module, "launch", lambda *a, **k: seen.append(k) or launch(*a, **k))
    q, k = heads(HQ).requires_grad_(), heads(HK).requires_grad_()
    yq, yk = qk_norm_rope(q, k, *weights(), *angles(torch.arange(S)))
    (yq.sum() + yk.sum()).backward()
    needs = {key: value for key, value in seen[-1].items() if key.startswith("NEEDS")}
    assert needs == {"NEEDS_DQ": True, "NEEDS_DK": True, "NEEDS_DQ_WEIGHT": False, "NEEDS_DK_WEIGHT": False}


def test_gradients_of_weights_add_up_over_all_programs() -> None:
    """Several samples, blocks of tokens and groups of heads; each counts once."""
    q, k = torch.randn(2, 9, 70, 4), torch.randn(2, 11, 70, 4)
    leaves = [q, k, *weights(4)]
    tables = torch.ones(70, 4), torch.zeros(70, 4)
    *_, dwq, dwk = gradients(qk_norm_rope, leaves, *tables)
    for x, dw in ((q, dwq), (k, dwk)):
        n = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
        torch.testing.assert_close(dw, n.sum((0, 1, 2)).float(), atol=2e-4, rtol=1e-5)


def test_tables_that_need_a_gradient_get_one() -> None:
    leaves = [heads(HQ), heads(HK), *weights()]
    cos, sin = (t.requires_grad_() for t in angles(torch.arange(S)))
    reasons = tigon.why_not("qk_norm_rope", *leaves, cos, sin)
    assert reasons == ["cos or sin requires a gradient, which only the reference computes"]
    qk_norm_rope(*leaves, cos, sin)[0].sum().backward()
    normed = tigon.rms_norm(leaves[0], leaves[2])
    torch.testing.assert_close(cos.grad, normed.sum((0, 1)), atol=1e-5, rtol=1e-5)


@both_backends
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    tables = angles(torch.arange(S))
    leaves = [heads(HQ), heads(1), *weights()]

    def block(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> Tensor:
        yq, yk = qk_norm_rope(q, k, wq, wk, *tables)
        # q feeds a second branch, which a write into it would spoil.
        return (yq @ yk.transpose(2, 3)).sum() + (q * q).sum()

    plain = [x.detach().requires_grad_() for x in leaves]
    block(*plain).backward()
    again = [x.detach().requires_grad_() for x in leaves]
    checkpoint(block, *again, use_reentrant=use_reentrant).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain, again, strict=True))


# ---- compiler ----


@both_backends
def test_one_graph_for_all_lengths() -> None:
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")

    def function(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return qk_norm_rope(q.transpose(1, 2), k.transpose(1, 2), wq, wk, cos, sin)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=graphs)
    counts = []
    # No two sizes alike in the first call, or the compiler takes them for the same size for ever.
    for batch, length in ((3, 9), (5, 6)):
        leaves = [torch.randn(batch, length, HQ + 1, D), torch.randn(batch, length, HK, D), *weights()]
        tables = angles(torch.arange(length).expand(batch, length))
        upstream = torch.randn(batch, HQ + 1, length, D), torch.randn(batch, HK, length, D)
        actual = gradients(compiled, leaves, *tables, upstream=upstream)
        expected = gradients(function, leaves, *tables, upstream=upstream)
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
        counts.append(graphs.frame_count)
    # The first call may build its graph twice, with eps as an input and then as a number.
    assert counts[0] == counts[1]


def test_operators_are_registered_rightly() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    tables = angles(torch.arange(S))
    rest = (1e-6, 0.0, "cast_then_scale", "half", "full", 1, [0, 2, 1, 3], [0, 1, 2, 3])
    forward, backward = torch.ops.tigon.qk_norm_rope_fwd.default, torch.ops.tigon.qk_norm_rope_bwd.default
    torch.library.opcheck(forward, (q, k, wq, wk, *tables, *rest))
    torch.library.opcheck(forward, (q, k, None, None, *tables, *rest))
    for needs in ([True, True, True, True], [True, True, False, False], [False, False, True, True]):
        torch.library.opcheck(backward, (q, k, wq, wk, *tables, q, k, *rest, needs))
    torch.library.opcheck(backward, (q, k, wq, wk, *tables, None, k, *rest, [False, True, False, True]))


# ---- sizes ----


@both_backends
@pytest.mark.parametrize(
    ("batch", "length", "q_heads", "k_heads"), [(0, 5, 4, 2), (2, 0, 4, 2), (2, 5, 0, 2), (2, 5, 4, 0), (1, 1, 1, 1)]
)
def test_empty_and_single(batch: int, length: int, q_heads: int, k_heads: int) -> None:
    q, k = torch.randn(batch, q_heads, length, D), torch.randn(batch, k_heads, length, D)
    leaves, tables = [q, k, *weights()], (torch.randn(length, D), torch.randn(length, D))
    actual = gradients(qk_norm_rope, leaves, *tables)
    expected = gradients(qk_norm_rope_reference, leaves, *tables)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@both_backends
def test_one_token_equals_that_token_of_a_sequence() -> None:
    q, k, (wq, wk) = heads(HQ), heads(HK), weights()
    cos, sin = angles(torch.arange(S))
    whole = qk_norm_rope(q, k, wq, wk, cos, sin)
    last = qk_norm_rope(q[:, :, -1:], k[:, :, -1:], wq, wk, cos[-1:], sin[-1:])
    assert all(torch.equal(a[:, :, -1:], b) for a, b in zip(whole, last, strict=True))


@pytest.mark.parametrize(("head_dim", "rotary"), [(2, 2), (48, 48), (80, 32), (96, 24), (256, 64), (257, 130)])
def test_head_dims_that_are_no_powers_of_two(head_dim: int, rotary: int) -> None:
    leaves = [torch.randn(1, 2, 3, head_dim), torch.randn(1, 1, 3, head_dim), *weights(head_dim)]
    tables = torch.randn(3, rotary), torch.randn(3, rotary)
    # With an eps that keeps the scale of a head of two small elements from growing without bound.
    actual = gradients(qk_norm_rope, leaves, *tables, eps=0.1)
    expected = gradients(qk_norm_rope_reference, leaves, *tables, eps=0.1)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def test_heads_too_wide_for_a_program_go_to_the_reference() -> None:
    q = torch.randn(1, 1, 1, 4096)
    tables = torch.randn(1, 2), torch.randn(1, 2)
    assert tigon.why_not("qk_norm_rope", q, q, None, None, *tables) == ["the head dim is above 2048"]
    assert torch.equal(qk_norm_rope(q, q, None, None, *tables)[0], qk_norm_rope_reference(q, q, None, None, *tables)[0])


@pytest.mark.parametrize(
    ("num_elements", "head_dim", "half", "expected"),
    [
        (1024, 128, 64, (8, 64, 1, 2)),
        (2048, 128, 64, (16, 64, 1, 4)),
        (1024, 64, 32, (16, 32, 1, 2)),
        (1024, 256, 128, (4, 128, 1, 2)),
        (2048, 256, 32, (4, 32, 256, 4)),
        (1024, 128, 32, (8, 32, 64, 2)),
        (1024, 80, 16, (8, 16, 64, 2)),
        (2048, 16, 8, (64, 8, 1, 2)),
        (1024, 2, 1, (64, 1, 1, 1)),
        (1024, 2048, 1024, (1, 1024, 1, 4)),
        (2048, 2047, 1, (1, 1, 2048, 8)),
    ],
)
def test_blocks(num_elements: int, head_dim: int, half: int, expected: tuple[int, ...]) -> None:
    """Powers of two that cover a head and hold no more elements than asked for, unless one head has more."""
    from tigon.ops.qk_norm_rope import _blocks

    block_t, block_r, block_rest, num_warps = _blocks(num_elements, head_dim, half)
    assert (block_t, block_r, block_rest, num_warps) == expected
    assert block_r >= half
    assert block_rest >= head_dim - 2 * half
    assert block_t == 1 or block_t * (2 * block_r + (block_rest if head_dim > 2 * half else 0)) <= num_elements


def test_packed_case_is_one_projection() -> None:
    spec = all_specs()["qk_norm_rope"]
    case = spec.case("packed")
    inputs = spec.inputs(case, Make(case, "cpu", torch.float32))
    q, k = inputs["q"], inputs["k"]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    assert not q.transpose(1, 2).is_contiguous()


# ---- errors ----

_GOOD = {
    "q": (2, 4, 5, 8),
    "k": (2, 2, 5, 8),
    "q_weight": (8,),
    "k_weight": (8,),
    "cos": (5, 8),
    "sin": (5, 8),
}


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"q": (4, 5, 8)}, {}, r"qk_norm_rope: q: expected four axes, got \(4, 5, 8\)"),
        ({"k": (2, 2, 6, 8)}, {}, r"qk_norm_rope: k: expected \(2, 2, 5, 8\), got \(2, 2, 6, 8\)"),
        ({"k": (2, 5, 8)}, {}, r"qk_norm_rope: k: expected"),
        ({"q_weight": (7,)}, {}, r"qk_norm_rope: q_weight: expected shape \(8,\), got \(7,\)"),
        ({"k_weight": (4, 8)}, {}, r"qk_norm_rope: k_weight: expected shape \(8,\), got \(4, 8\)"),
        (
            {"k_weight": None},
            {},
            r"qk_norm_rope: k_weight: expected a tensor with q_weight, None without, got NoneType",
        ),
        ({"q_weight": None}, {}, r"qk_norm_rope: k_weight: expected a tensor with q_weight, None without, got Tensor"),
        (
            {"q_weight": None, "k_weight": None},
            {"offset": 1.0},
            r"qk_norm_rope: offset: expected 0 without weights, got 1.0",
        ),
        (
            {"q_weight": None, "k_weight": None},
            {"cast": "cast_to_weight"},
            r"qk_norm_rope: q_weight: expected a tensor for this cast, got None",
        ),
        ({"cos": (8,), "sin": (8,)}, {}, r"qk_norm_rope: cos: expected two or three axes"),
        ({"cos": (4, 8), "sin": (4, 8)}, {}, r"qk_norm_rope: cos: expected \(5, 8\), got \(4, 8\)"),
        ({"cos": (1, 6, 8), "sin": (1, 6, 8)}, {}, r"qk_norm_rope: cos: expected \(5, 8\), got \(1, 6, 8\)"),
        ({"cos": (3, 5, 8), "sin": (3, 5, 8)}, {}, r"qk_norm_rope: cos: expected \(2, 5, 8\), got \(3, 5, 8\)"),
        ({"cos": (5, 7), "sin": (5, 7)}, {}, r"qk_norm_rope: cos: expected an even number of columns .* got 7"),
        ({"cos": (5, 10), "sin": (5, 10)}, {}, r"qk_norm_rope: cos: expected a rotary width .* got 10"),
        ({}, {"tables": "half"}, r"qk_norm_rope: cos: expected a rotary width .* got 16"),
        ({"sin": (5, 6)}, {}, r"qk_norm_rope: sin: expected \(5, 8\), got \(5, 6\)"),
        ({}, {"cast": "late"}, r"qk_norm_rope: cast: expected one of 'cast_then_scale'"),
        ({}, {"layout": "pairs"}, r"qk_norm_rope: layout: expected one of 'half'"),
        ({}, {"tables": "both"}, r"qk_norm_rope: tables: expected one of 'full', 'half', got 'both'"),
        ({}, {"unsqueeze_dim": 0}, r"qk_norm_rope: unsqueeze_dim: expected one of 1, 2, got 0"),
        ({}, {"unsqueeze_dim": 2}, r"qk_norm_rope: k: expected \(2, 4, 5, 8\), got \(2, 2, 5, 8\)"),
    ],
)
def test_errors_state_what_was_expected(shapes: dict, options: dict, message: str) -> None:
    sizes = {**_GOOD, **shapes}
    tensors = {name: None if shape is None else torch.randn(shape) for name, shape in sizes.items()}
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**tensors, **options)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("q", lambda t: t.long(), r"qk_norm_rope: q: expected a floating-point dtype, got torch.int64"),
        ("k_weight", lambda t: t.long(), r"qk_norm_rope: k_weight: expected a floating-point dtype"),
        ("sin", lambda t: t.half(), r"qk_norm_rope: sin: expected torch.float32, got torch.float16"),
        ("q_weight", lambda t: t.to("meta"), r"qk_norm_rope: q_weight: expected device cpu, got meta"),
    ],
)
def test_errors_of_dtypes_and_devices(name: str, change: Any, message: str) -> None:
    tensors = {key: torch.randn(shape) for key, shape in _GOOD.items()}
    tensors[name] = change(tensors[name])
    with pytest.raises(ValueError, match=message):
        qk_norm_rope(**tensors)
