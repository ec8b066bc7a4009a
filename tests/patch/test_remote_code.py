"""A model whose code comes with its weights: classes that no release of transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tigon
from tigon.patch import _head, _norms, _rope

FUSIONS = ("add_rms_norm", "qk_norm_rope")

CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "made_for_a_test"

    def __init__(self, width=32, inner=48, depth=2, heads=4, vocab_size=61, own_loss=False, **kwargs):
        self.width, self.inner, self.depth, self.heads, self.own_loss = width, inner, depth, heads, own_loss
        self.vocab_size = vocab_size
        super().__init__(**kwargs)
"""

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_tiny import TinyConfig


class Scale(nn.Module):
    def __init__(self, width, epsilon=1e-5):
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, inputs):
        x = inputs.float()
        x = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (x * (1.0 + self.gamma.float())).to(inputs.dtype)


def turned(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rotate(queries, keys, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return queries * cos + turned(queries) * sin, keys * cos + turned(keys) * sin


class Attend(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, self.size = config.heads, config.width // config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.scale_q, self.scale_k = Scale(self.size), Scale(self.size)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def forward(self, x, cos, sin):
        q, k, v = (self.split(line(x)) for line in (self.query, self.key, self.value))
        q, k = rotate(self.scale_q(q), self.scale_k(k), cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.both = nn.Linear(config.width, 2 * config.inner, bias=False)
        self.back = nn.Linear(config.inner, config.width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.back(self.act(gate) * up)


class Step(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first, self.second = Scale(config.width), Scale(config.width)
        self.attend, self.gated = Attend(config), Gated(config)

    def forward(self, x, cos, sin):
        x = self.attend(self.first(x), cos, sin) + x
        return self.gated(self.second(x)) + x


class TinyForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TinyConfig
    _tied_weights_keys = {}

    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.width)
        self.steps = nn.ModuleList(Step(config) for _ in range(config.depth))
        self.last = Scale(config.width)
        self.words = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.words

    def forward(self, input_ids, labels=None, **kwargs):
        x = self.table(input_ids)
        size = self.config.width // self.config.heads
        angles = torch.arange(x.shape[1])[:, None] * 0.7 ** torch.arange(size // 2)
        angles = torch.cat((angles, angles), -1)[None]
        for step in self.steps:
            x = step(x, angles.cos(), angles.sin())
        logits, loss = self.words(self.last(x)), None
        if labels is not None and self.config.own_loss:
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1))
        elif labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a repository of such a model holds, but for weights."""
    # Code is copied to a cache and imported from there.
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "cache"))
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "configuration_tiny.py").write_text(CONFIGURATION, encoding="utf-8")
    (repository / "modeling_tiny.py").write_text(MODEL, encoding="utf-8")
    automatic = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"}
    config = {"model_type": "made_for_a_test", "auto_map": automatic}
    (repository / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return repository


@pytest.mark.parametrize("own_loss", [False, True])
@pytest.mark.parametrize("fuse", [(), FUSIONS])
def test_remote_code_trains_as_without_patching(
    fuse: Any, own_loss: bool, folder: Path, batch: Any, step: Any, assert_same_step: Any, monkeypatch: Any
) -> None:
    calls: list[str] = []
    for module, name in (
        (_norms, "rms_norm"),
        (_rope, "rope"),
        (_rope, "qk_norm_rope"),
        (_head, "linear_cross_entropy"),
    ):
        operator = getattr(module, name)
        counted = lambda *args, _name=name, _op=operator, **kwargs: calls.append(_name) or _op(*args, **kwargs)  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True, own_loss=own_loss)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).train()
    assert type(model).__module__.startswith("transformers_modules.")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    native = step(model, batch)
    report = tigon.patch(model, fuse=fuse, strict=True)
    rows = {(row.cls, row.form): row.count for row in report}
    together = {("Attend", "qk_norm_rope"): 2, ("Step", "add_rms_norm"): 2} if fuse else {}
    assert rows == {
        ("Scale", "rms_norm"): 9,
        ("Attend", "rope"): 2,
        ("Gated", "glu"): 2,
        ("TinyForCausalLM", "linear_cross_entropy"): 1,
        **together,
    }
    assert_same_step(step(model, batch), native)
    wanted = {"rms_norm", "linear_cross_entropy", "qk_norm_rope" if fuse else "rope"}
    assert set(calls) == wanted
    model.save_pretrained(folder / "saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "saved", trust_remote_code=True).train()
    assert_same_step(step(loaded, batch), native)
    tigon.patch(loaded, fuse=fuse, strict=True)
    assert_same_step(step(loaded, batch), native)
