"""How the losses get at their gradients: groups, kernels, products, dtypes, compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.losses import plain, test_policy, test_preference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tigon
from tigon import losses
from tigon.losses._driver import plan_groups
from tigon.testing import assert_within_budget


@pytest.mark.parametrize("unit", ["token", "sequence", "pair", "batch"])
@pytest.mark.parametrize("fit", [1, 3, 5, 10, 19, 30, 1000])
def test_groups_cover_every_token_once(unit: str, fit: int) -> None:
    length = 5
    groups = plan_groups(6, length, unit, fit)  # type: ignore[arg-type]
    rows = {"token": 1, "sequence": 5, "pair": 10, "batch": 30}[unit]
    if rows > fit:
        assert groups is None
        return
    seen = torch.zeros(6, length, dtype=torch.long)
    for g in groups or ():
        ends = [(g.first, g.last)] + ([(3 + g.first, 3 + g.last)] if unit == "pair" else [])
        for i, j in ends:
            seen[i:j, g.start : g.stop] += 1
        assert len(ends) * (g.last - g.first) * (g.stop - g.start) <= fit
    assert (seen == 1).all()


def _dpo(given: dict[str, Any], ours: list[Tensor], **options: Any) -> Any:
    return losses.dpo(*ours[:2], given["labels"], bias=ours[2], ref_log_probs=given["ref"], **options)


def _grpo(given: dict[str, Any], ours: list[Tensor], **options: Any) -> Any:
    options = {"mask": given["mask"], "old_log_probs": given["old"], "entropy_coef": 0.2, **options}
    return losses.grpo(*ours[:2], given["labels"], given["advantages"]["sequences"], bias=ours[2], **options)


LOSSES = {"dpo": (test_preference.inputs, _dpo), "grpo": (test_policy.inputs, _grpo)}


def _to(given: Any, dtype: torch.dtype) -> Any:
    if isinstance(given, dict):
        return {k: _to(v, dtype) for k, v in given.items()}
    return given.to(dtype) if given.is_floating_point() else given


class ProductSpy(TorchDispatchMode):
    """Counts multiplications in matrix products."""

    multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func.overloadpacket in (aten.mm, aten.addmm, aten.addmm_):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "dtype", "products"),
    [
        ({}, torch.float32, 3),
        ({"max_logits_bytes": 10 * 11 * 4}, torch.float32, 3),
        # Smaller than a pair; of tokens that is enough.
        ({"max_logits_bytes": 5 * 11 * 4}, torch.float32, {"dpo": 4, "grpo": 3}),
        ({"max_logits_bytes": 10 * 11 * 4, "skip_ignored": True}, torch.float32, 3),
        ({}, torch.bfloat16, 3),
        # The loss scale has to be known before dlogits are rounded.
        ({}, torch.float16, 4),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_products_of_each_row(name: str, options: dict[str, Any], dtype: torch.dtype, products: Any) -> None:
    """In units of one product of all rows; ignored ones take none where they are skipped."""
    make, function = LOSSES[name]
    given = _to(make(), dtype)
    ours = test_preference.leaves(given)
    with ProductSpy() as spy:
        function(given, ours, **options).loss.backward()
    wanted = products[name] if isinstance(products, dict) else products
    labels, mask = given["labels"], given.get("mask")
    valid = labels != -100 if mask is None else mask
    rows = int(valid.sum()) if options.get("skip_ignored") else labels.numel()
    assert spy.multiplications == wanted * rows * 6 * 11


@pytest.mark.parametrize("name", LOSSES)
def test_reference_takes_one_product_more(name: str) -> None:
    make, function = LOSSES[name]
    given = _to(make(), torch.float32)
    ours = test_preference.leaves(given)
    reference = {"ref_hidden": torch.randn(*given["labels"].shape, 6)}
    reference |= {"ref_log_probs": None} if name == "dpo" else {"beta": 0.1}
    with ProductSpy() as spy:
        if name == "dpo":
            losses.dpo(*ours[:2], given["labels"], bias=ours[2], **reference).loss.backward()
        else:
            function(given, ours, **reference).loss.backward()
    assert spy.multiplications == 4 * given["labels"].numel() * 6 * 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("name", LOSSES)
def test_within_the_budget_of_the_plain_form(name: str, backend: str, dtype: torch.dtype) -> None:
    """Kernels and plain torch, against full logits in the same dtype and in fp64."""
    if dtype == torch.bfloat16 and backend == "auto":
        backend = "torch"  # The interpreter truncates to 16 bits where hardware rounds.
    make, function = LOSSES[name]
    given = _to(make(), dtype)

    def of_plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        wide = _to(given, dtype)
        theirs = test_preference.leaves(wide)
        labels = given["labels"] if name == "dpo" else torch.where(given["mask"], given["labels"], -100)
        z = torch.nn.functional.linear(*theirs).to(torch.promote_types(dtype, torch.float32))
        eye = torch.eye(z.shape[-1], dtype=z.dtype)
        log_probs, entropy = plain.token_log_probs(z, eye, labels)
        wide = _to(given, z.dtype)
        if name == "dpo":
            loss = plain.dpo(log_probs, labels, wide["ref"], "sigmoid")["loss"]
        else:
            asked = {"old": wide["old"], "entropy_coef": 0.2, "loss_type": "dapo"}
            loss = plain.policy(log_probs, entropy, given["mask"], wide["advantages"]["sequences"], asked)["loss"]
        return loss, *torch.autograd.grad(loss, theirs)

    with tigon.backend(backend):
        ours = test_preference.leaves(given)
        out = function(given, ours, max_logits_bytes=10 * 11 * dtype.itemsize)
        made = out.loss, *torch.autograd.grad(out.loss, ours)
    names = "loss", "dhidden", "dweight", "dbias"
    for each, value, low, high in zip(names, made, of_plain(dtype), of_plain(torch.float64), strict=True):
        # A single number may be as near as chance will have it.
        floor = 1e-6 * high.abs().item() if each == "loss" else 0.0
        assert_within_budget(each, value, low, high, floor=floor)


@pytest.mark.parametrize("name", LOSSES)
def test_compiles_whole_with_changing_shapes(name: str) -> None:
    make, function = LOSSES[name]
    given = _to(make(), torch.float32)

    def step(*ours: Tensor) -> Tensor:
        return function(given, list(ours)).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for keep in (5, 4):
        for key, value in list(given.items()):
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == 5:
                given[key] = value[:, :keep].contiguous()
        a, b = test_preference.leaves(given), test_preference.leaves(given)
        made, wanted = compiled(*a), step(*b)
        torch.testing.assert_close(made, wanted)
        for x, y in zip(torch.autograd.grad(made, a), torch.autograd.grad(wanted, b), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_multiplies_in_16_bits_and_keeps_the_loss_in_32(name: str) -> None:
    make, function = LOSSES[name]
    given = _to(make(), torch.float32)
    for options in ({}, {"max_logits_bytes": 11 * 4}):
        ours = test_preference.leaves(given)
        # The interpreter truncates to 16 bits where hardware rounds.
        with torch.autocast("cpu", torch.bfloat16), tigon.backend("torch"):
            out = function(given, ours, **options)
        assert out.loss.dtype == torch.float32
        half = _to(given, torch.bfloat16)
        half = given | {k: half[k] for k in ("hidden", "weight", "bias")}
        theirs = test_preference.leaves(half)
        with tigon.backend("torch"):
            wanted = function(half, theirs, **options)
        torch.testing.assert_close(out.loss, wanted.loss, rtol=1e-6, atol=0)
        gradients = torch.autograd.grad(out.loss, ours)
        assert all(g.dtype == torch.float32 for g in gradients)
        for a, b in zip(gradients, torch.autograd.grad(wanted.loss, theirs), strict=True):
            torch.testing.assert_close(a, b.float(), rtol=0.02, atol=1e-4)


def test_dtypes_that_no_product_takes_are_refused() -> None:
    given = test_preference.inputs()
    with pytest.raises(ValueError, match="weight: expected dtype"):
        losses.dpo(given["hidden"].float(), given["weight"], given["labels"], reference_free=True)


def test_nothing_at_all() -> None:
    """No sequences, and sequences of no tokens."""
    for shape in ((0, 5), (4, 0)):
        hidden = torch.zeros(*shape, 6, requires_grad=True)
        weight, labels = torch.zeros(11, 6, requires_grad=True), torch.zeros(shape, dtype=torch.long)
        for out in (
            losses.dpo(hidden, weight, labels, reference_free=True),
            losses.orpo(hidden, weight, labels),
            losses.kto(hidden, weight, labels, torch.ones(shape[0]), reference_free=True),
            losses.grpo(hidden, weight, labels, torch.ones(shape[0])),
        ):
            assert out.loss.isfinite()
            for gradient in torch.autograd.grad(out.loss, (hidden, weight), allow_unused=True):
                assert gradient is None or (gradient == 0).all()


def test_inputs_are_not_written() -> None:
    for make, function in LOSSES.values():
        given = _to(make(), torch.float32)
        before = {k: v.clone() for k, v in given.items() if isinstance(v, Tensor)}
        function(given, test_preference.leaves(given)).loss.backward()
        assert all(torch.equal(given[k], v) for k, v in before.items())


def test_no_second_derivative() -> None:
    given = test_preference.inputs()
    ours = test_preference.leaves(given)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(_dpo(given, ours).loss, ours, create_graph=True)
