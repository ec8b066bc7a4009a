from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops import kl_div
from tigon.ops._check import require_number

from .._missing import missing_from
from .._options import require_reduction, require_rows

__getattr__ = missing_from(__name__)
_EPS = 1e-10


class LigerKLDivLossFunction:
    @staticmethod
    def apply(
        y_pred: Tensor, y_true: Tensor, reduction: Any = "batchmean", log_target: bool = False, eps: float = _EPS
    ) -> Tensor:
        require_rows("liger_kl_div", y_pred)
        require_reduction("liger_kl_div", reduction)
        if not log_target:
            # A least target inside the logarithm. Here there is none, which an element shows by at most eps / e.
            require_number("liger_kl_div", "eps", eps, low=0, high=_EPS)
        return kl_div(y_pred, y_true, log_target=log_target, reduction=reduction)
