"""One specification per operator."""

from importlib import import_module

from ._spec import Case, Cost, Make, Mutation, OpSpec

__all__ = ["Case", "Cost", "Make", "Mutation", "OpSpec", "all_specs"]

# One module each, in the order in which they are shown.
NAMES = (
    "rms_norm",
    "rms_norm_gated",
    "sandwich_norm",
    "layer_norm",
    "group_norm",
    "modulated_norm",
    "glu",
    "swiglu",
    "geglu",
    "glu_linear",
    "rms_norm_glu",
    "rms_norm_mlp",
    "lora_linear",
    "nf4_lora_linear",
    "rope",
    "qk_norm_rope",
    "cross_entropy",
    "linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "linear_log_probs",
    "linear_divergence",
    "softmax",
    "log_softmax",
    "sparsemax",
    "kl_div",
    "jsd",
    "tvd",
)


def all_specs() -> dict[str, OpSpec]:
    """Every specification by operator name."""
    return {name: import_module(f".{name}", __name__).SPEC for name in NAMES}
