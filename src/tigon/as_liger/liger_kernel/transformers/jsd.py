from __future__ import annotations

from torch import Tensor, nn

from ..ops import LigerJSDFunction


class LigerJSD(nn.Module):
    """Of log-probabilities: those of the student come first."""

    def __init__(self, beta: float = 0.5, ignore_index: int = -100) -> None:
        super().__init__()
        self.beta, self.ignore_index = beta, ignore_index

    def forward(self, log_q: Tensor, log_p: Tensor, shift_labels: Tensor | None = None) -> Tensor:
        return LigerJSDFunction.apply(log_q, log_p, shift_labels, self.beta, self.ignore_index)
