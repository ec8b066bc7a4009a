from __future__ import annotations

from torch import Tensor

from .. import _losses
from .._missing import missing_from

__getattr__ = missing_from(__name__)


class LigerCrossEntropyFunction:
    @staticmethod
    def apply(
        _input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> _losses.Parts:
        return _losses.of_logits(
            _input,
            target,
            weight,
            ignore_index,
            lse_square_scale,
            label_smoothing,
            reduction,
            softcap,
            return_z_loss,
            return_token_accuracy,
            return_predicted_tokens,
        )
