from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops import tvd

from .._missing import missing_from
from .._options import require_reduction, require_rows

__getattr__ = missing_from(__name__)


class LigerTVDLossFunction:
    @staticmethod
    def apply(
        p: Tensor,
        q: Tensor,
        shift_labels: Tensor | None = None,
        reduction: Any = "batchmean",
        ignore_index: int = -100,
    ) -> Tensor:
        require_rows("liger_tvd", p)
        require_reduction("liger_tvd", reduction)
        return tvd(p, q, reduction=reduction, labels=shift_labels, ignore_index=ignore_index)
