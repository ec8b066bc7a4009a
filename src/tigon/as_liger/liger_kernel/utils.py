"""Questions about the machine."""

from __future__ import annotations

import importlib.util

import torch

from ._missing import missing_from

PEFT_AVAILABLE = importlib.util.find_spec("peft") is not None
__getattr__ = missing_from(__name__)


def is_peft_available() -> bool:
    return PEFT_AVAILABLE


def is_npu_available() -> bool:
    return infer_device() == "npu"


def infer_device() -> str:
    """The type of the accelerator in use, "cpu" without one."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None or not torch.accelerator.is_available() else accelerator.type


def infer_comm_backend() -> str:
    """The backend of torch.distributed for the device."""
    return torch.distributed.get_default_backend_for_device(infer_device())
