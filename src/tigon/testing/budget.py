"""The error budget: a kernel may be as wrong as plain torch in the same dtype, not as wrong as looks harmless.

    error(a) = rms(a - high)                                    high: the reference in fp64
    error(actual) <= factor * error(low) + noise * rms(high)    low: the reference in the dtype of the kernel

and the same with the largest error and twice the factor, so that one bad row cannot hide in a mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Room for another order of summation where the reference happens to be exact: four fp32 roundings.
NOISE = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Measured:
    """Errors of one tensor against the fp64 reference, and the bounds they must keep."""

    rms_error: float
    rms_bound: float
    max_error: float
    max_bound: float

    @property
    def ratio(self) -> float:
        """Share of the budget that is used: 1 is the limit."""
        shares = [
            0.0 if error == 0 else error / bound if bound > 0 else float("inf")
            for error, bound in ((self.rms_error, self.rms_bound), (self.max_error, self.max_bound))
        ]
        return max(shares)


def measure(actual: Tensor, low: Tensor, high: Tensor, *, factor: float = 2.0, floor: float = 0.0) -> Measured:
    """Errors of `actual` against `high` and the bounds that `low` sets.

    `floor` is added to the bound: the absolute error allowed where a result cancels to rounding noise.
    Values that are not finite in `high` must be the same in `actual`; they do not enter the errors.

    Raises:
        AssertionError: shape or dtype of `actual` is not that of `low`, or a non-finite value differs.
    """
    if actual.shape != low.shape:
        raise AssertionError(f"shape {tuple(actual.shape)}, reference {tuple(low.shape)}")
    if actual.dtype != low.dtype:
        raise AssertionError(f"dtype {actual.dtype}, reference {low.dtype}")
    a, b, h = (t.detach().to(torch.float64) for t in (actual, low, high))
    # A value beyond the range of the low dtype is infinite there and finite in fp64: the low run decides.
    finite = torch.isfinite(h) & torch.isfinite(b)
    odd_actual, odd_low = a[~finite], b[~finite]
    if not torch.equal(torch.nan_to_num(odd_actual, nan=1e300), torch.nan_to_num(odd_low, nan=1e300)):
        raise AssertionError("non-finite values differ from the reference's")
    if not finite.all():
        a, b, h = a[finite], b[finite], h[finite]
    if a.numel() == 0:
        return Measured(0.0, 0.0, 0.0, 0.0)
    if not torch.isfinite(a).all():
        raise AssertionError(f"{int((~torch.isfinite(a)).sum())} of {a.numel()} values are not finite")
    actual_error, low_error = (a - h).abs(), (b - h).abs()
    return Measured(
        rms_error=float(actual_error.square().mean().sqrt()),
        rms_bound=float(factor * low_error.square().mean().sqrt() + NOISE * h.square().mean().sqrt() + floor),
        max_error=float(actual_error.max()),
        max_bound=float(2 * factor * low_error.max() + NOISE * h.abs().max() + 2 * floor),
    )


def assert_within_budget(
    name: str, actual: Tensor, low: Tensor, high: Tensor, *, factor: float = 2.0, floor: float = 0.0
) -> Measured:
    """Raise AssertionError naming the tensor, its error and its bound unless `actual` keeps the budget."""
    try:
        measured = measure(actual, low, high, factor=factor, floor=floor)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from None
    if measured.ratio > 1:
        raise AssertionError(
            f"{name}: rms error {measured.rms_error:.3e} (bound {measured.rms_bound:.3e}), "
            f"largest error {measured.max_error:.3e} (bound {measured.max_bound:.3e})"
        )
    return measured
