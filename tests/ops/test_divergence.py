"""What the generic checks cannot say of `kl_div`, `jsd` and `tvd`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tigon
from tigon.ops import jsd_reference, kl_div_reference, tvd_reference
from tigon.testing import assert_within_budget

NAN, INF = float("nan"), float("inf")
REFERENCES = {tigon.kl_div: kl_div_reference, tigon.jsd: jsd_reference, tigon.tvd: tvd_reference}
# Each form of the kernels: function, options, and whether the second argument is in log space.
FORMS = {
    "kl_div": (tigon.kl_div, {}, False),
    "kl_div_log": (tigon.kl_div, {"log_target": True}, True),
    "jsd": (tigon.jsd, {"beta": 0.3}, True),
    "jsd_0": (tigon.jsd, {"beta": 0.0}, True),
    "jsd_1": (tigon.jsd, {"beta": 1.0}, True),
    "tvd": (tigon.tvd, {}, False),
}


pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return request.param


def _pair(form: str, *shape: int) -> tuple[Tensor, Tensor]:
    """Distributions as the function takes them."""
    first, second = (torch.randn(shape).mul(2).log_softmax(-1) for _ in range(2))
    function, _, is_log = FORMS[form]
    return first.exp() if function is tigon.tvd else first, second if is_log else second.exp()


def _run(
    function: Callable[..., Tensor], first: Tensor, second: Tensor, upstream: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and both gradients."""
    leaves = [t.detach().requires_grad_() for t in (first, second)]
    loss = function(*leaves, **options)
    loss.backward(torch.ones_like(loss) if upstream is None else upstream.to(loss.dtype))
    assert all(leaf.grad is not None for leaf in leaves)
    return loss.detach(), leaves[0].grad, leaves[1].grad  # type: ignore[return-value]


def _call(form: str, first: Tensor, second: Tensor, upstream: Tensor | None = None, **options: Any) -> Any:
    function, own, _ = FORMS[form]
    return _run(function, first, second, upstream, **own, **options)


# Values.


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum", "none"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_agrees_with_torch(backend: str, log_target: bool, reduction: str) -> None:
    x, target = _pair("kl_div_log" if log_target else "kl_div", 6, 129)
    options = {"log_target": log_target, "reduction": reduction}
    actual = _run(tigon.kl_div, x, target, **options)
    low = _run(F.kl_div, x, target, **options)
    high = _run(F.kl_div, x.double(), target.double(), **options)
    for name, a, b, c in zip(("loss", "dx", "dtarget"), actual, low, high, strict=True):
        assert_within_budget(name, a, b, c)


def test_generalised_jsd_is_the_formula(backend: str) -> None:
    """Teacher and student that differ in shape, so that the roles cannot be exchanged unnoticed."""
    p, q = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.1, 0.3, 0.6]])

    def kl(a: Tensor, b: Tensor) -> float:
        return float((a.double() * (a.double() / b.double()).log()).sum())

    for beta in (0.0, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1.0):
        m = beta * p.double() + (1 - beta) * q.double()
        expected = beta * kl(p, m) + (1 - beta) * kl(q, m)
        expected = kl(p, q) if beta == 0 else kl(q, p) if beta == 1 else expected
        actual = tigon.jsd(q.log(), p.log(), beta=beta).item()
        assert actual == pytest.approx(expected, rel=2e-6, abs=1e-7)


def test_jsd_of_a_symmetric_pair(backend: str) -> None:
    x, y = (torch.tensor([pair]).log_softmax(-1) for pair in ([1.0, 0.0], [0.0, 1.0]))
    for beta, expected in ((0.0, 0.462117), (0.1, 0.040959), (1.0, 0.462117)):
        assert tigon.jsd(x, y, beta=beta).item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1e-7, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_student_that_is_its_teacher_has_no_loss(beta: float) -> None:
    x = torch.randn(4, 300).log_softmax(-1)
    loss, dx, dy = _run(tigon.jsd, x, x.clone(), beta=beta)
    assert loss == 0
    # At the ends the gradients are those of a divergence that is no longer squared: -p and p.
    if 0 < beta < 1:
        assert dx.abs().max() == dy.abs().max() == 0


@pytest.mark.parametrize("gap", [1e-4, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_student_close_to_its_teacher_keeps_its_digits(beta: float, gap: float) -> None:
    """The loss is the square of the gap: logarithms near -10, rounded by themselves, would leave nothing of it."""
    y = torch.randn(2, 5000).log_softmax(-1)
    x = y + gap * torch.randn(2, 5000)
    loss, dx, dy = _run(tigon.jsd, x, y, beta=beta)
    high = _run(jsd_reference, x.double(), y.double(), beta=beta)
    assert loss.item() == pytest.approx(high[0].item(), rel=1e-6 / gap + 1e-5)
    for actual, expected in ((dx, high[1]), (dy, high[2])):
        assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_total_variation_of_what_shares_nothing_is_one(backend: str) -> None:
    p, q = torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.0, 0.0, 1.0]])
    loss, dp, dq = _run(tigon.tvd, p, q)
    assert loss == 1
    assert dp.tolist() == [[0.5, 0.5, -0.5]]
    assert torch.equal(dq, -dp)


def test_total_variation_has_no_gradient_at_equality(backend: str) -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.5, 0.5, 0.0]])
    _, dp, dq = _run(tigon.tvd, p, q, reduction="none")
    assert dp.tolist() == [[0.0, -0.5, 0.5]]
    assert dq.tolist() == [[0.0, 0.5, -0.5]]


# Probability 0.


def test_target_of_zero_adds_nothing(backend: str) -> None:
    x = torch.tensor([[-INF, -INF, math.log(0.5), math.log(0.5)]])
    t = torch.tensor([[0.0, 0.0, 0.5, 0.5]])
    for target, log_target in ((t, False), (t.log(), True)):
        loss, dx, dt = _run(tigon.kl_div, x, target, log_target=log_target)
        assert loss == 0
        assert torch.equal(dx, -t)
        assert torch.equal(dt, torch.tensor([[0.0, 0.0, 0.5 if log_target else 1.0, 0.5 if log_target else 1.0]]))


def test_target_where_the_model_has_nothing_is_infinite(backend: str) -> None:
    x, t = torch.tensor([[0.0, -INF], [-1.0, -0.5]]), torch.tensor([[0.5, 0.5], [0.4, 0.6]])
    for loss, dx, _ in (
        _run(tigon.kl_div, x, t, reduction="rows"),
        _run(tigon.kl_div, x, t.log(), log_target=True, reduction="rows"),
        _run(tigon.jsd, x, t.log(), beta=0, reduction="rows"),
    ):
        assert loss.isinf().tolist() == [True, False]
        torch.testing.assert_close(dx, -t)
    assert tigon.jsd(t.log(), x, beta=1, reduction="rows").isinf().tolist() == [True, False]


@pytest.mark.parametrize("beta", [1e-6, 0.1, 0.5, 0.9])
def test_jsd_is_finite_where_either_has_nothing(backend: str, beta: float) -> None:
    """Without a common class it is the entropy of the mixture weights."""
    x = torch.tensor([[0.0, -INF, -INF], [math.log(0.5), math.log(0.5), -INF]])
    y = torch.tensor([[-INF, 0.0, -INF], [-INF, math.log(0.5), math.log(0.5)]])
    loss, dx, dy = _run(tigon.jsd, x, y, beta=beta, reduction="rows")
    entropy = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    assert loss[0].item() == pytest.approx(entropy, rel=1e-6)
    assert loss[1].item() == pytest.approx(entropy / 2, rel=1e-6)
    torch.testing.assert_close(dx[0], torch.tensor([-(1 - beta) * math.log1p(-beta), 0.0, 0.0]))
    torch.testing.assert_close(dy[0], torch.tensor([0.0, -beta * math.log(beta), 0.0]))
    assert torch.isfinite(dx).all()
    assert torch.isfinite(dy).all()


def test_nan_is_not_hidden(backend: str, form: str) -> None:
    for position in range(2):
        pair = _pair(form, 3, 50)
        pair[position][1, 7] = NAN
        function, own, _ = FORMS[form]
        assert function(*pair, **own, reduction="rows").isnan().tolist() == [False, True, False]


# Rows that do not count, and divisors.


@pytest.mark.parametrize("stored", [NAN, INF, -INF])
@pytest.mark.parametrize("reduction", ["batchmean", "rows", "none"])
def test_what_an_ignored_row_holds_does_not_matter(backend: str, form: str, reduction: str, stored: float) -> None:
    first, second = _pair(form, 5, 40)
    labels = torch.tensor([1, -100, 0, -100, 39])
    kept = labels != -100
    expected = _call(form, first[kept], second[kept], reduction=reduction)
    first[~kept] = stored
    second[~kept] = stored
    loss, *gradients = _call(form, first, second, labels=labels, reduction=reduction)
    if reduction in ("rows", "none"):
        assert (loss[~kept] == 0).all()
        loss = loss[kept]
    torch.testing.assert_close(loss, expected[0])
    for actual, of_kept in zip(gradients, expected[1:], strict=True):
        torch.testing.assert_close(actual[kept], of_kept)
        assert (actual[~kept] == 0).all()


@pytest.mark.parametrize("options", [{}, {"num_items": 12}, {"num_items": 0}], ids=str)
@pytest.mark.parametrize("reduction", ["batchmean", "mean"])
def test_all_ignored_is_zero(backend: str, form: str, reduction: str, options: dict[str, Any]) -> None:
    stored = torch.full((4, 8), NAN)
    labels = torch.full((4,), -100)
    for result in _call(form, stored, stored, labels=labels, reduction=reduction, **options):
        assert (result == 0).all()


@pytest.mark.parametrize("num_items", [0, torch.tensor(0)], ids=str)
def test_divisor_of_zero_gives_zero(backend: str, form: str, num_items: Any) -> None:
    for result in _call(form, *_pair(form, 4, 8), num_items=num_items):
        assert (result == 0).all()


@pytest.mark.parametrize("labelled", [False, True])
def test_divisors(backend: str, form: str, labelled: bool) -> None:
    first, second = _pair(form, 2, 3, 8)
    labels = torch.tensor([[1, 2, -1], [3, -1, 4]]) if labelled else None
    options = {"labels": labels, "ignore_index": -1}
    count = 4 if labelled else 6
    total = _call(form, first, second, reduction="sum", **options)
    rows = _call(form, first, second, reduction="rows", **options)
    elements = _call(form, first, second, reduction="none", **options)
    assert (rows[0].shape, elements[0].shape) == ((2, 3), (2, 3, 8))
    torch.testing.assert_close(elements[0].sum(-1), rows[0])
    torch.testing.assert_close(rows[0].sum(), total[0])
    for divisor, given in (
        (count, {}),
        (count * 8, {"reduction": "mean"}),
        *((12, {"num_items": n}) for n in (12, 12.0, np.int64(12), torch.tensor(12), torch.tensor([[12.0]]))),
        (96, {"num_items": 12, "reduction": "mean"}),
    ):
        mean = _call(form, first, second, **options, **given)
        assert mean[0].shape == ()
        for actual, summed in zip(mean, total, strict=True):
            torch.testing.assert_close(actual, summed / divisor)


# Upstream and the gradients that are asked for.


@pytest.mark.parametrize("reduction", ["rows", "none"])
def test_each_loss_has_its_upstream_gradient(backend: str, form: str, reduction: str) -> None:
    first, second = _pair(form, 4, 30)
    _, dfirst, dsecond = _call(form, first, second, reduction=reduction)
    shape = (4,) if reduction == "rows" else (4, 30)
    upstream = torch.randn(*shape, 2)[..., 0]
    factor = upstream.unsqueeze(-1) if reduction == "rows" else upstream
    actual = _call(form, first, second, upstream, reduction=reduction)
    torch.testing.assert_close(actual[1:], (dfirst * factor, dsecond * factor))


def test_only_the_gradients_asked_for_are_computed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("tigon.ops.divergence")
    launched: list[tuple[bool, bool]] = []
    launch = module.launch

    def spy(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if "NEEDS_DX" in constants:
            launched.append((constants["NEEDS_DX"], constants["NEEDS_DY"]))
        launch(kernel, grid, *args, **constants)

    monkeypatch.setattr(module, "launch", spy)
    function, own, _ = FORMS[form]
    for wanted in ((True, False), (False, True), (True, True)):
        leaves = [t.requires_grad_(needed) for t, needed in zip(_pair(form, 3, 20), wanted, strict=True)]
        function(*leaves, **own).backward()
        assert tuple(t.grad is not None for t in leaves) == wanted
    assert launched == [(True, False), (False, True), (True, True)]


# Layouts and dtypes.


@pytest.mark.parametrize("columns", [3, 127, 4097, 256_000])
def test_number_of_columns_is_not_limited(form: str, columns: int) -> None:
    function, own, _ = FORMS[form]
    first, second = _pair(form, 2, columns)
    actual = _run(function, first, second, **own)
    low = _run(REFERENCES[function], first, second, **own)
    high = _run(REFERENCES[function], first.double(), second.double(), **own)
    for name, a, b, c in zip(("loss", "dfirst", "dsecond"), actual, low, high, strict=True):
        assert_within_budget(name, a, b, c)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x.mT,
        lambda x: x[..., ::3],
        lambda x: x[:1].expand(4, -1, -1),
        lambda x: x[0, 0],
        lambda x: x[:0],
    ],
)
@pytest.mark.parametrize("reduction", ["batchmean", "none"])
def test_layouts(form: str, reduction: str, view: Callable[[Tensor], Tensor]) -> None:
    first, second = (view(t) for t in _pair(form, 2, 3, 5))
    labels = torch.zeros(first.shape[:-1], dtype=torch.int64)
    if labels.numel() > 1:
        labels.view(-1)[1] = -100
    strided = labels.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    expected = _call(form, first.contiguous(), second.contiguous(), labels=labels, reduction=reduction)
    actual = _call(form, first, second, labels=strided, reduction=reduction)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_dtypes_may_differ(form: str) -> None:
    first, second = _pair(form, 4, 40)
    actual = _call(form, first.half(), second)
    assert [t.dtype for t in actual] == [torch.float32, torch.float16, torch.float32]
    expected = _call(form, first.half().float(), second)
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1], expected[1].half())
    torch.testing.assert_close(actual[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loss_of_half_precision_is_fp32(form: str, dtype: torch.dtype) -> None:
    first, second = (t.to(dtype) for t in _pair(form, 4, 40))
    # The interpreter truncates where hardware rounds.
    with tigon.backend("torch" if first.is_cpu else "auto"):
        actual = _call(form, first, second)
        expected = _call(form, first.float(), second.float())
    assert [t.dtype for t in actual] == [torch.float32, dtype, dtype]
    torch.testing.assert_close(actual[0], expected[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_any_integer_labels(backend: str, dtype: torch.dtype) -> None:
    # 156 is -100 in eight bits.
    labels = torch.tensor([0, 100 if dtype == torch.int8 else 156, 5])
    first, second = _pair("tvd", 3, 10)
    expected = _call("tvd", first, second)
    for actual, of_all in zip(_call("tvd", first, second, labels=labels.to(dtype)), expected, strict=True):
        torch.testing.assert_close(actual, of_all)


# Arguments, compiler, registration.


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        (torch.zeros(2, 3).long(), {}, "{second}: expected a floating-point dtype, got torch.int64"),
        (torch.zeros(2, 4), {}, r"{second}: expected shape \(2, 3\), got \(2, 4\)"),
        (torch.zeros(2, 3, device="meta"), {}, "{second}: expected device cpu, got meta"),
        (
            None,
            {"reduction": "avg"},
            "reduction: expected one of 'batchmean', 'mean', 'sum', 'rows', 'none', got 'avg'",
        ),
        (None, {"labels": [0, 1]}, "labels: expected a tensor, got list"),
        (None, {"labels": torch.zeros(2)}, "labels: expected an integer dtype, got torch.float32"),
        (None, {"labels": torch.zeros(3, dtype=torch.int64)}, r"labels: expected shape \(2,\), got \(3,\)"),
        (None, {"num_items": 3, "reduction": "sum"}, "num_items: expected None unless the reduction is a mean"),
        (None, {"num_items": -1}, "num_items: expected a finite number in"),
        (None, {"num_items": True}, "num_items: expected a finite number in"),
        (None, {"num_items": torch.ones(2)}, r"num_items: expected one element, got shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("name", ["kl_div", "jsd", "tvd"])
def test_arguments_are_checked(name: str, second: Tensor | None, options: dict[str, Any], message: str) -> None:
    names = {"kl_div": "target", "jsd": "teacher_log_probs", "tvd": "q"}
    first = torch.zeros(2, 3, device="cpu")
    with pytest.raises(ValueError, match=f"^{name}: " + message.replace("{second}", names[name])):
        getattr(tigon, name)(first, torch.zeros(2, 3, device="cpu") if second is None else second, **options)


def test_shapes_without_a_distribution_are_refused() -> None:
    with pytest.raises(ValueError, match="tvd: p: expected at least one axis, got a scalar"):
        tigon.tvd(torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"tvd: p: expected at least one column, got \(2, 0\)"):
        tigon.tvd(torch.ones(2, 0), torch.ones(2, 0))


@pytest.mark.parametrize("beta", [-0.1, 1.1, NAN, None, True])
def test_beta_is_a_weight(beta: Any) -> None:
    with pytest.raises(ValueError, match=r"jsd: beta: expected a finite number in \[0, 1\]"):
        tigon.jsd(torch.zeros(2, 3), torch.zeros(2, 3), beta=beta)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("kl_div", {}),
        ("tvd", {}),
        ("jsd", {}),
        ("jsd", {"num_items": 9, "reduction": "mean"}),
        ("jsd", {"reduction": "none"}),
        ("jsd_1", {"reduction": "rows"}),
    ],
    ids=str,
)
def test_compiles_with_changing_shapes(backend: str, form: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    function, own, _ = FORMS[form]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 8):
        first, second = _pair(form, rows, 40)
        labels = torch.arange(rows) - 2
        given = {**own, **options, "labels": labels, "ignore_index": 0}
        actual, expected = (_run(f, first, second, **given) for f in (compiled, function))
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("elements", [False, True])
@pytest.mark.parametrize("kind", ["kl", "kl_log", "reverse_kl_log", "jsd", "tvd"])
def test_registered_operators_are_sound(kind: str, elements: bool) -> None:
    first, second = torch.rand(4, 9), torch.rand(4, 9)
    options = (kind, 0.3, -100, elements)
    for labels in (None, torch.tensor([1, -100, 2, 3])):
        torch.library.opcheck(torch.ops.tigon.divergence_fwd, (first, second, labels, *options))
    dloss = torch.randn(4, 9) if elements else torch.randn(4)
    for needs in ((True, False), (False, True), (True, True)):
        torch.library.opcheck(torch.ops.tigon.divergence_bwd, (first, second, None, dloss, *needs, *options))
