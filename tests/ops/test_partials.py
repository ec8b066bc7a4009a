"""Sums over partial rows: every row counts once, whatever the number of rows and columns."""

from __future__ import annotations

import pytest
import torch

from tigon.ops._partials import sum_partials
from tigon.ops._triton import INTERPRETED


@pytest.mark.parametrize("num_partials", [0, 1, 3, 512, 513, 1024, 1025, 2600])
@pytest.mark.parametrize("num_cols", [1, 16, 37])
def test_every_row_counts_once(num_partials: int, num_cols: int, device: torch.device) -> None:
    if device.type == "cpu" and not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1 or --device cuda")
    partial = torch.randint(-8, 9, (num_partials, num_cols), device=device).float()
    out = torch.full((num_cols,), float("nan"), device=device)
    sum_partials(partial, out)
    # Small integers: any order gives the exact sum.
    assert torch.equal(out, partial.sum(0))
