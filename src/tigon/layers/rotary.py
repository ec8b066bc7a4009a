"""Rotary embedding in the place of a host's function."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.rope import rope
from . import _host


class RotaryPosEmb(nn.Module):
    """The rotary embedding that the host is, with its gradient, so that one function serves training and evaluation.

    What stands in place of a function stands there for all models of a process that call it.
    """

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        host = type(self)
        is_half = 2 * cos.shape[-1] == q.shape[-1]
        fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and unsqueeze_dim in (1, 2)
        fits = fits and (is_half or cos.shape[-1] == q.shape[-1]) and k.shape[-1] == q.shape[-1]
        form = _host.rope_form(host, is_half) if fits else None
        if form is None:
            _host.note(host, "rotary_pos_emb")
            return host.forward(self, q, k, cos, sin, unsqueeze_dim)
        layout, inverse, keeps_dtype = form
        tables = "half" if is_half else "full"
        turned = rope(q, k, cos, sin, layout=layout, tables=tables, unsqueeze_dim=unsqueeze_dim, inverse=inverse)
        return (turned[0].to(q.dtype), turned[1].to(k.dtype)) if keeps_dtype else turned
