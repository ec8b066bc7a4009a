"""What the drop-in puts on a model beside the patch: functions of a module, so that copies and pickles work."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

from torch import Tensor, nn

from tigon.ops import cross_entropy
from tigon.patch import Report, patch
from tigon.patch._apply import also_undo
from tigon.patch._head import LENIENT, causal_lm_loss, rows_of_labels
from tigon.patch._hf import calls_loss_function, is_pretrained_model, native_loss
from tigon.patch._swap import is_installed

logger = logging.getLogger("tigon")

# What each flag stands for among the forms of tigon.patch.
FORMS_OF = {
    "rope": ("rope",),
    "rms_norm": ("rms_norm", "rms_norm_gated"),
    "layer_norm": ("layer_norm",),
    "swiglu": ("glu", "experts"),
    "geglu": ("glu", "experts"),
    "fused_linear_cross_entropy": ("linear_cross_entropy",),
}
# Arguments of a forward of Liger-Kernel's that the loss of a patched model does not have.
_NOT_TAKEN = (
    "accum_dtype",
    "ce_weight",
    "label_smoothing",
    "lse_square_scale",
    "return_predicted_tokens",
    "return_token_accuracy",
    "return_z_loss",
    "use_token_scaling",
)
# The attribute of a model that holds what stored_logits_loss took the place of.
_LOSS_BEFORE = "_tigon_loss_before"


def stored_logits_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The causal language model loss of transformers by `tigon.cross_entropy`, without a copy of the logits in fp32."""
    rows = rows_of_labels(logits, labels, vocab_size, ignore_index, shift_labels)
    if rows is None:
        return native_loss()(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    return cross_entropy(logits, rows, ignore_index=ignore_index, num_items=num_items_in_batch)


def apply_to(model: nn.Module, chosen: dict[str, bool]) -> Report | None:
    """Patch a model as the flags say; None when they are all off.

    Raises:
        ValueError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if chosen.get("fused_linear_cross_entropy"):
        # The loss that an earlier call put there is not the model's own.
        for module in model.modules():
            _restore_loss(module)
    only = list(dict.fromkeys(form for flag, forms in FORMS_OF.items() if chosen.get(flag) for form in forms))
    report = patch(model, only=only) if only else None
    if chosen.get("cross_entropy"):
        _fuse_stored_logits(model)
    has_loss = chosen.get("cross_entropy") or chosen.get("fused_linear_cross_entropy")
    if has_loss or report is not None:
        hook = _before if has_loss else _without_skip_logits
        for module in model.modules():
            # Inner models too: adapters call the forward of the outer one past its hooks, and it hands keywords on.
            if is_pretrained_model(module):
                module.__dict__[LENIENT] = True
                if hook not in module._forward_pre_hooks.values():
                    module.register_forward_pre_hook(hook, with_kwargs=True)
    return report


def _undo(module: nn.Module) -> None:
    """Undo `apply_to` as far as it is not a patch."""
    module.__dict__.pop(LENIENT, None)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in (_before, _without_skip_logits)]:
        del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
    _restore_loss(module)


def _restore_loss(module: nn.Module) -> None:
    before = module.__dict__.pop(_LOSS_BEFORE, None)
    if before is not None and module.__dict__.get("_loss_function") is stored_logits_loss:
        del module.__dict__["_loss_function"]
        module.__dict__.update(before)


also_undo.append(_undo)


def _fuse_stored_logits(model: nn.Module) -> None:
    found, native = [], (native_loss(), stored_logits_loss) if _has_transformers() else ()
    for name, module in model.named_modules():
        # Asked for only where a forward calls it: the property warns about modules that have none.
        if not is_pretrained_model(module) or not calls_loss_function(type(module).forward):
            continue
        loss = getattr(module, "loss_function", None)
        if loss is causal_lm_loss:
            warnings.warn(f"cross_entropy: {type(module).__name__} is fused with its head already", stacklevel=3)
            found.append(name)
        elif loss in native:
            if loss is not stored_logits_loss:
                before = module.__dict__.get("_loss_function")
                module.__dict__[_LOSS_BEFORE] = {} if before is None else {"_loss_function": before}
            module.loss_function = stored_logits_loss
            found.append(name)
    if not found:
        warnings.warn(f"cross_entropy: {type(model).__name__} has no causal language model loss", stacklevel=3)
    elif any(os.environ.get(name, "0") not in ("", "0") for name in ("TIGON_DEBUG", "LIGER_KERNEL_DEBUG")):
        names = ", ".join(name or "the model itself" for name in found)
        logger.warning("tigon.as_liger: cross_entropy of stored logits in %s", names)


def _has_transformers() -> bool:
    return "transformers.loss.loss_utils" in sys.modules


def _before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Refuse what nobody would honour."""
    refused = [name for name in _NOT_TAKEN if kwargs.get(name)]
    if refused:
        raise ValueError(
            f"forward: {', '.join(refused)}: the loss of a patched model has no such option; LigerForCausalLMLoss or"
            " LigerFusedLinearCrossEntropyLoss on the hidden states has"
        )
    return _without_skip_logits(model, args, kwargs)


def _without_skip_logits(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Take away `skip_logits`, which trainers pass in any case, where the forward is the model's own."""
    if "skip_logits" in kwargs and not (
        is_installed(model) and model.__dict__["_tigon"].form == "linear_cross_entropy"
    ):
        return args, {name: value for name, value in kwargs.items() if name != "skip_logits"}
    return None
