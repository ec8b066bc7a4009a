"""RMS norms in the place of a host's forward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..ops.rms_norm import rms_norm
from ..ops.rms_norm_gated import rms_norm_gated
from . import _host


class RMSNorm(nn.Module):
    """The RMS norm that the host is: eps, offset of the weight and the places where it rounds are the host's."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        host = type(self)
        form = _host.norm_form(host)
        if form is None:
            _host.note(host, "RMSNorm")
            return host.forward(self, hidden_states)
        eps, offset, cast = form
        return rms_norm(hidden_states, self.weight, eps=getattr(self, eps), offset=offset, cast=cast)


class RMSNormGated(nn.Module):
    """The RMS norm with a gate that the host is, before it or after."""

    has_backward = True
    can_torch_compile = True

    weight: Tensor

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        host = type(self)
        if gate is None:
            return host.forward(self, hidden_states, gate)
        form = _host.gated_norm_form(host, _activation(self))
        if form is None:
            _host.note(host, "RMSNormGated")
            return host.forward(self, hidden_states, gate)
        eps, activation, norm_before_gate, cast = form
        return rms_norm_gated(
            hidden_states,
            self.weight,
            gate,
            eps=getattr(self, eps),
            activation=activation,
            norm_before_gate=norm_before_gate,
            cast=cast,
        )


def _activation(module: Any) -> str | None:
    activation = getattr(module, "activation", None)
    return activation if isinstance(activation, str) else None
