"""The table of forms: what a module of each kind looks like, what its numbers might mean, what replaces its forward.

A form matches on structure only: parameters, shapes, children, float attributes. What the module computes is
found by running it (see _probe.py); a module that no candidate reproduces is left alone, with the reason.
"""

from __future__ import annotations

from . import _add_norm, _experts, _glu, _glu_linear, _lora, _norm_mlp, _norms, _qk_norm_rope
from ._form import Form, Found, argument_of
from ._form import is_plain as _is_plain

__all__ = ["FORMS", "FORM_NAMES", "FUSIONS", "Form", "Found", "_is_plain", "argument_of"]

FORMS = (
    Form("rms_norm", _norms.match_rms_norm, _norms.verify_rms_norm, _norms.rms_norm_forward),
    Form("rms_norm_gated", _norms.match_rms_norm_gated, _norms.verify_rms_norm_gated, _norms.rms_norm_gated_forward),
    Form("layer_norm", _norms.match_layer_norm, _norms.verify_layer_norm, _norms.layer_norm_forward),
    Form("glu", _glu.match, _glu.verify, _glu.forward),
    Form("experts", _experts.match, _experts.verify, _experts.forward),
)
FORM_NAMES = (*(form.name for form in FORMS), "rope", "linear_cross_entropy")
# Across modules, and only when asked for.
FUSIONS = (_add_norm.NAME, _qk_norm_rope.NAME, _glu_linear.NAME, _norm_mlp.NAME, _lora.NAME)
