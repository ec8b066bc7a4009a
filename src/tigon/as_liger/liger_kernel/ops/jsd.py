from __future__ import annotations

from typing import Any

from torch import Tensor

from tigon.ops import jsd

from .._missing import missing_from
from .._options import require_default, require_rows

__getattr__ = missing_from(__name__)


class LigerJSDFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        shift_labels: Tensor | None = None,
        beta: float = 0.5,
        ignore_index: int = -100,
        jsd_impl: Any = None,
        jsd_mode: Any = None,
    ) -> Tensor:
        """The student comes first."""
        require_default("liger_jsd", jsd_impl=jsd_impl, jsd_mode=jsd_mode)
        require_rows("liger_jsd", _input)
        return jsd(_input, target, beta=beta, labels=shift_labels, ignore_index=ignore_index)
