"""Two processes that share a model in the ways torch has: a step is as the native model's, with as many exchanges."""

from __future__ import annotations

import copy
import traceback
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tigon

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- ways to share ----


def _fsdp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        import functools

        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        layer = type(model.model.layers[0])
        given = dict(options)
        if given.pop("layers", False):
            given["auto_wrap_policy"] = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={layer})
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **given)

    return wrap


def _checkpointed(model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    layer = type(model.model.layers[0])
    apply_activation_checkpointing(model, check_fn=lambda module: type(module) is layer)


def _fully_shard(*units: str, checkpoints: bool = False, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        if checkpoints:
            _checkpointed(model)
        given = dict(options)
        if given.pop("mixed", False):
            given["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if given.pop("offload", False):
            given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        parts = {"layers": model.model.layers, "head": [model.lm_head]}
        for unit in units:
            for module in parts[unit]:
                fully_shard(module, **given)
        fully_shard(model, **given)
        return model

    return wrap


def _tensor_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), plan)
    return model


class _Halves(nn.Module):
    """Norms and MLPs of a model, of which a rank has half of the sequence."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        rank = torch.distributed.get_rank()
        x, labels = self.model.embed_tokens(input_ids).chunk(2, 1)[rank], labels.chunk(2, 1)[rank]
        for layer in self.model.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits = self.lm_head(self.model.norm(x))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return types.SimpleNamespace(loss=loss, logits=logits)


def _sequence_parallel(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    outer, split = _Halves(model), Shard(1)
    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=split),
    }
    for layer in outer.model.layers:
        parallelize_module(layer, mesh, plan)
    return outer


_ALL = frozenset({"linear_cross_entropy", "rope", "rms_norm", "glu"})
_FLAT = _ALL - {"rms_norm"}


class Way(NamedTuple):
    """How a model is shared, and by how much a step may differ, where it rounds to 16 bits."""

    wrap: Callable[[nn.Module], nn.Module]
    tolerance: float = 1e-5
    # All ranks see the same rows.
    same_rows: bool = False
    # Exchanges more than native: a head that is shared by itself is given its hidden states, and called for the loss.
    more: int = 0
    # Forms that are found when it is patched afterwards: fewer where a rank has parts of flat parameters.
    after: frozenset[str] = _ALL
    is_fused: bool = True


WAYS = {
    "FSDP1": Way(_fsdp(use_orig_params=True), after=_FLAT),
    "FSDP1, layers": Way(_fsdp(use_orig_params=True, layers=True), after=_FLAT),
    "FSDP1, layers, flat parameters": Way(_fsdp(use_orig_params=False, layers=True), after=_FLAT),
    "FSDP2, the model as one": Way(_fully_shard()),
    "FSDP2, layers": Way(_fully_shard("layers")),
    "FSDP2, layers and head": Way(_fully_shard("layers", "head"), more=1),
    "FSDP2, kept whole after forward": Way(_fully_shard("layers", "head", reshard_after_forward=False)),
    "FSDP2, bf16": Way(_fully_shard("layers", mixed=True), tolerance=3e-2),
    "FSDP2, offloaded": Way(_fully_shard("layers", offload=True)),
    "FSDP2, checkpointed layers": Way(_fully_shard("layers", checkpoints=True)),
    "tensor parallel": Way(_tensor_parallel, same_rows=True),
    "sequence parallel": Way(_sequence_parallel, same_rows=True, after=_ALL - {"linear_cross_entropy"}, is_fused=False),
}
FUSE = ("qk_norm_rope", "rms_norm_mlp", "glu_linear")
PATCHED: dict[str, dict[str, Any]] = {
    "before": {},
    "after": {},
    "before, fused": {"fuse": FUSE},
    "after, fused": {"fuse": FUSE},
}


# ---- one of two processes ----


class _Exchanges(TorchDispatchMode):
    """Counts what is sent, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in str(function):
            self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def _step(model: nn.Module, whole: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """Two optimiser steps: losses, all parameters, and the exchanges of the second."""
    from torch.distributed.tensor import DTensor

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        with _Exchanges() as seen:
            output = model(**batch)
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.loss))
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(model):
            parameters = {
                k.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for k, p in model.named_parameters()
            }
    else:
        parameters = {
            k.replace("_checkpoint_wrapped_module.", ""): (p.full_tensor() if isinstance(p, DTensor) else p)
            .detach()
            .clone()
            for k, p in model.named_parameters()
        }
    return {"losses": losses, "parameters": parameters, "exchanges": dict(seen.counts), "fused": output.logits is None}


def _work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    model, batch = torch.load(f"{folder}/model.pt", weights_only=False)
    results: dict[tuple[str, str], Any] = {}
    with tigon.backend("torch"):
        for name, way in WAYS.items():
            given = batch if way.same_rows else {key: value[rank : rank + 1] for key, value in batch.items()}
            for when in ("native", *PATCHED):
                each = copy.deepcopy(model)
                try:
                    if when.startswith("before"):
                        report = tigon.patch(each, **PATCHED[when])
                    outer = way.wrap(each)
                    if when.startswith("after"):
                        report = tigon.patch(outer, **PATCHED[when])
                    results[name, when] = _step(outer, each, given)
                    if when != "native":
                        results[name, when]["forms"] = {row.form: row.count for row in report.replaced}
                except Exception:
                    results[name, when] = traceback.format_exc()
    torch.save(results, f"{folder}/results{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    from tests.patch.conftest import make_model

    folder = tmp_path_factory.mktemp("sharded")
    ids = torch.randint(3, 61, (2, 10), generator=torch.Generator().manual_seed(2))
    labels = ids.masked_fill(torch.arange(10) < 3, -100)
    torch.save((make_model("Qwen3"), {"input_ids": ids, "labels": labels}), folder / "model.pt")
    mp.spawn(_work, (str(folder),), nprocs=2)
    return [torch.load(Path(folder, f"results{rank}.pt"), weights_only=False) for rank in range(2)]


# ---- tests ----


@pytest.mark.parametrize("when", PATCHED)
@pytest.mark.parametrize("name", WAYS)
def test_a_step_is_that_of_the_native_model(name: str, when: str, results: list[dict[tuple[str, str], Any]]) -> None:
    tolerance = WAYS[name].tolerance
    for rank in range(2):
        native, actual = results[rank][name, "native"], results[rank][name, when]
        assert not isinstance(native, str), native
        assert not isinstance(actual, str), actual
        assert actual["losses"] == pytest.approx(native["losses"], rel=tolerance)
        assert actual["losses"][0] != actual["losses"][1]
        assert actual["parameters"].keys() == native["parameters"].keys()
        for key, value in native["parameters"].items():
            torch.testing.assert_close(actual["parameters"][key], value, rtol=tolerance, atol=tolerance, msg=key)
        assert sum(actual["exchanges"].values()) == sum(native["exchanges"].values()) + WAYS[name].more
        assert (_ALL if when.startswith("before") else WAYS[name].after) <= actual["forms"].keys()
        assert (native["fused"], actual["fused"]) == (False, WAYS[name].is_fused)
