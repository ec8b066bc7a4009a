"""Adapters, data parallel, sharding and hooks around a patched model."""

from __future__ import annotations

import copy
import inspect
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import tigon
from tigon.patch import _head

BEFORE_AFTER = pytest.mark.parametrize("when", ["before", "after"])


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    operator = _head.linear_cross_entropy
    monkeypatch.setattr(_head, "linear_cross_entropy", lambda *a, **k: calls.append(k) or operator(*a, **k))
    return calls


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=8, init_lora_weights=False, **options))
    return model.train()


ADAPTERS = {
    "attention": ({"target_modules": ["q_proj", "v_proj"]}, True, True),
    "mlp": ({"target_modules": ["gate_proj", "up_proj", "down_proj"]}, True, True),
    # The adapter meets the deferred logits, or wraps the head before it is patched: exact, not fused.
    "head": ({"target_modules": ["lm_head"]}, False, False),
    "saved head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False, False),
}


@BEFORE_AFTER
@pytest.mark.parametrize("where", ADAPTERS)
def test_adapters_train_as_without_patching(
    where: str, when: str, build: Any, batch: Any, step: Any, assert_same_step: Any, fused: list[Any]
) -> None:
    options, fused_before, fused_after = ADAPTERS[where]
    native = step(adapted(build("Llama"), **options), batch)
    model = build("Llama")
    if when == "before":
        tigon.patch(model)
    model = adapted(model, **options)
    if when == "after":
        report = tigon.patch(model)
        assert {row.form for row in report.replaced} >= {"rms_norm", "glu", "rope"}
        assert ("linear_cross_entropy" in {row.form for row in report.replaced}) == fused_after
    actual = step(model, batch)
    assert native["grads"]
    assert_same_step(actual, native)
    assert bool(fused) == (fused_before if when == "before" else fused_after)


def test_b07_an_adapted_model_still_takes_the_count(build: Any, batch: Any) -> None:
    model = adapted(build("Llama"), target_modules=["q_proj"])
    base = model.get_base_model()
    signature = inspect.signature(base.forward)
    loss = model(**batch, num_items_in_batch=12).loss
    tigon.patch(model)
    assert inspect.signature(base.forward) == signature
    assert any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())
    torch.testing.assert_close(model(**batch, num_items_in_batch=12).loss, loss)


def test_b116_unknown_types_and_remote_code_are_patched_by_structure(build: Any, batch: Any) -> None:
    import transformers

    class RemoteConfig(transformers.LlamaConfig):
        model_type = "never_heard_of"

    class RemoteForCausalLM(transformers.LlamaForCausalLM):
        config_class = RemoteConfig

    model = RemoteForCausalLM(RemoteConfig(**build("Llama").config.to_diff_dict() | {"model_type": "never_heard_of"}))
    report = tigon.patch(model, strict=True)
    assert {row.form for row in report} == {"rms_norm", "glu", "rope", "linear_cross_entropy"}
    assert model.train()(**batch).logits is None


def test_accelerate_hooks_keep_their_place(build: Any, batch: Any, fused: list[Any]) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = build("Llama")
    loss = model(**batch).loss
    seen: list[str] = []

    class Hook(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return args, kwargs

    for module in (model, model.lm_head, model.model.norm, model.model.layers[0].mlp):
        hooks.add_hook_to_module(module, Hook())
    before = [dict(module.__dict__) for module in model.modules()]
    report = tigon.patch(model, strict=True)
    assert {row.form for row in report} == {"rms_norm", "glu", "rope", "linear_cross_entropy"}
    torch.testing.assert_close(model(**batch).loss, loss)
    assert len(fused) == 1
    assert set(seen) == {"LlamaForCausalLM", "Linear", "LlamaRMSNorm", "LlamaMLP"}
    tigon.unpatch(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_mixed_precision_wrappers_of_accelerate_are_not_taken_for_ours(build: Any, batch: Any) -> None:
    operations = pytest.importorskip("accelerate.utils.operations")
    model = build("Llama")
    tigon.patch(model)
    inner = model.forward
    under_autocast = torch.autocast("cpu", torch.bfloat16)(inner.__func__)
    model.forward = types.MethodType(operations.convert_outputs_to_fp32(under_autocast), model)
    output = model(**batch)
    assert (output.logits, "logits" in output) == (None, False)
    assert {row.reason for row in tigon.patch(model).kept} == {
        "the forward of its LlamaForCausalLM was replaced on the instance already"
    }
    with pytest.warns(UserWarning, match="was wrapped after patching"):
        tigon.unpatch(model)
    # Nothing defers any more, so that what is left of the patch passes everything on.
    assert model(**batch).logits is not None
    model.forward = inner
    tigon.unpatch(model)
    assert "_tigon" not in model.__dict__
    assert model.forward.__func__ is type(model).forward


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fuse", [(), ("add_rms_norm", "qk_norm_rope", "glu_linear")])
@pytest.mark.parametrize("find_unused", [False, True])
@BEFORE_AFTER
def test_distributed_data_parallel_trains_as_without_patching(
    when: str,
    find_unused: bool,
    fuse: Any,
    build: Any,
    batch: Any,
    step: Any,
    assert_same_step: Any,
    fused: list[Any],
    process_group: None,
) -> None:
    def parallel(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=find_unused)

    native = step(parallel(build("Qwen3")), batch)
    model = build("Qwen3")
    if when == "before":
        tigon.patch(model, fuse=fuse, strict=True)
    model = parallel(model)
    if when == "after":
        tigon.patch(model, fuse=fuse, strict=True)
    for count in (1, 2):
        actual = step(model, batch)
        assert_same_step(actual, native)
        assert len(fused) == count
    assert actual["output"].logits is None


def train(rank: int, folder: str) -> None:
    """One of two processes: two steps of a replicated model, before against after patching."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    from torch.nn.parallel import DistributedDataParallel

    model, batch = torch.load(f"{folder}/model.pt", weights_only=False)
    results = []
    with tigon.backend("torch"):
        for patched in ("no", "before", "after", "fused before", "fused after"):
            each = copy.deepcopy(model)
            fuse = ["add_rms_norm", "qk_norm_rope", "glu_linear"] if "fused" in patched else []
            if "before" in patched:
                tigon.patch(each, fuse=fuse, strict=True)
            outer = DistributedDataParallel(each)
            if "after" in patched:
                tigon.patch(outer, fuse=fuse, strict=True)
            losses = []
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for _ in range(2):
                output = outer(**{key: value[rank : rank + 1] for key, value in batch.items()})
                assert (output.logits is None) == (patched != "no")
                output.loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(output.loss))
            results.append((losses, [p.detach() for p in each.parameters()]))
    for losses, parameters in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        for a, b in zip(parameters, results[0][1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_b90_two_processes_train_as_without_patching(build: Any, batch: Any, tmp_path: Path) -> None:
    torch.save((build("Qwen3"), batch), tmp_path / "model.pt")
    mp.spawn(train, (str(tmp_path),), nprocs=2)
