"""Tiny random models whose numbers make mistakes visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tigon

pytest.importorskip("transformers")
import transformers

transformers.logging.set_verbosity_error()

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
# The cap is small, so that the logits pass it.
OPTIONS: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "Qwen3": {"head_dim": 8},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.3},
}


def make_model(family: str, **options: Any) -> nn.Module:
    """A tiny random causal language model in training mode.

    Norm weights and biases are drawn at random, since at their initial values an offset or a bias does not show.
    """
    torch.manual_seed(0)
    name = f"{family}TextConfig" if hasattr(transformers, f"{family}TextConfig") else f"{family}Config"
    config = getattr(transformers, name)(**{**SIZES, **OPTIONS.get(family, {}), **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Not around zero, which saturates the attention and leaves gradients that are all rounding.
                parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
            elif "lm_head" in name or ("embed" in name and config.tie_word_embeddings):
                # Large enough for logits that matter, and for a cap to show.
                parameter.mul_(20 if hasattr(config, "final_logit_softcapping") else 5)
    return model.train()


@pytest.fixture
def build() -> Callable[..., nn.Module]:
    return make_model


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Two rows of nine tokens, four labels of which are ignored."""
    ids = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1, -1] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(autouse=True)
def _torch_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """References instead of the slow interpreter, unless the test is about the kernels."""
    if "kernels" in request.keywords:
        yield
        return
    with tigon.backend("torch"):
        yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels: runs the kernels, not the references")


@pytest.fixture
def step() -> Callable[..., dict[str, Any]]:
    """Run a training step: loss, gradients by name, and the output."""

    def run(model: nn.Module, batch: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, Any]:
        model.zero_grad(set_to_none=True)
        output = model(**batch, **kwargs)
        output.loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": output.loss.detach(), "grads": grads, "output": output}

    return run


@pytest.fixture
def assert_same_step() -> Callable[..., None]:
    """Loss to 1e-5, every gradient to 1e-4 of its largest element: fp32 sums in another order."""

    def check(actual: dict[str, Any], expected: dict[str, Any], gradient: float = 1e-4) -> None:
        torch.testing.assert_close(actual["loss"], expected["loss"], rtol=1e-5, atol=1e-5)
        assert actual["grads"].keys() == expected["grads"].keys()
        for name, want in expected["grads"].items():
            error = (actual["grads"][name] - want).abs().max() / want.abs().max().clamp_min(1e-20)
            assert error < gradient, f"{name}: relative error {error:.1e}"

    return check
