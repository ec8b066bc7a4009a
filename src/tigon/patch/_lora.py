"""A linear layer with a low-rank adapter: one operator does both, and keeps neither dropped-out input nor mask.

What is looked for is a layer with children `base_layer`, `lora_A`, `lora_B` and `lora_dropout`, all but the first by
the name of an adapter, and factors `scaling` by that name. The replacement multiplies with the parameters of these
children outside their own forwards, so that it looks at every call, as `_glu_linear` does, whether it may: adapters are
merged, switched off, exchanged and sharded after patching too. Where it may not, the layer's own forward runs.

The base layer is a plain `nn.Linear`, or one whose weight has a `quant_state` of 4 bits (NF4), which is run once
against what the operator makes of that weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops._device import why_no_kernels
from ..ops._nf4 import dequantize_nf4
from ..ops._op import autocast_dtype, current_backend
from ..ops.lora_linear import lora_linear, lora_linear_reference
from ..ops.nf4_lora_linear import nf4_lora_linear
from . import _form, _probe, _swap
from ._deferred import real
from ._form import Found, Match, argument_of, is_plain
from ._glu_linear import note, why_called
from ._probe import Refused

NAME = "lora_linear"
_CHILDREN = ("base_layer", "lora_A", "lora_B", "lora_dropout")


class LoraSettings(NamedTuple):
    pass


class Parts(NamedTuple):
    """What the verdict depends on besides the class of the layer."""

    has_bias: bool
    # Why its own forward must run, "" where it need not.
    why: str
    # Class of a base layer of 4 bits.
    base: type | None = None


class Adapter(NamedTuple):
    """What one call multiplies with."""

    name: str
    base: nn.Module
    a: nn.Module
    b: nn.Module
    scaling: float
    dropout: float
    # How its weight is made of what is stored, None for a plain one.
    four_bits: dict[str, Any] | None = None


def match(module: nn.Module, parts: Parts | None = None) -> Match:
    children = [module._modules.get(name) for name in _CHILDREN]
    if not all(isinstance(child, nn.ModuleDict) for child in children[1:]):
        return "no"
    has_state = all(hasattr(module, name) for name in ("disable_adapters", "merged", "active_adapters"))
    is_layer = _probe.sizes_of(children[0]) and type(module.__dict__.get("scaling")) is dict
    return "sure" if has_state and is_layer else "no"


def parts_of(module: nn.Module) -> Parts:
    try:
        adapter = adapter_of(module)
    except Refused as refused:
        return Parts(False, str(refused))
    return Parts(adapter.base.bias is not None, "", None if adapter.four_bits is None else type(adapter.base))


def opaque(module: nn.Module, parts: Parts) -> tuple[str, ...]:
    # The probe has adapters of its own, and each call looks.
    return (*module.__dict__, *module._modules)


def adapter_of(module: nn.Module) -> Adapter:
    """The adapter in use, if there is one that the operator knows.

    Raises:
        Refused: the layer must compute by itself, with the reason.
    """
    if module.disable_adapters:
        raise Refused("its adapters are disabled")
    if module.merged:
        raise Refused("its adapters are merged")
    children = module._modules
    names = [name for name in module.active_adapters if name in children["lora_A"]._modules]  # type: ignore[union-attr]
    if len(names) != 1:
        raise Refused(f"{len(names)} of its adapters are active")
    (name,) = names
    for kinds in ("lora_variant", "use_dora"):
        if kind := module.__dict__.get(kinds, {}).get(name):
            kind = "one with DoRA" if kind is True else f"a {type(kind).__name__}"
            raise Refused(f"its adapter is {kind}, not a plain product")
    base = children["base_layer"]
    a, b, dropout = (children[each]._modules.get(name) for each in _CHILDREN[1:])  # type: ignore[union-attr]
    four_bits = None if type(base) is nn.Linear else _four_bits(base)
    checked = ((a, "lora_A"), (b, "lora_B"))
    for child, called in checked if four_bits is not None else ((base, "base layer"), *checked):
        if child is None or (why := why_called(child)):
            raise Refused(f"its {called} {why if child is not None else 'is missing'}")
    if a.bias is not None or b.bias is not None:
        raise Refused("its adapter has a bias")
    scaling = module.scaling.get(name)
    if type(scaling) not in (int, float):
        raise Refused(f"its scaling is a {type(scaling).__name__}")
    return Adapter(name, base, a, b, scaling, _dropout_of(dropout), four_bits)


def _four_bits(base: nn.Module) -> dict[str, Any] | None:
    """How to make the weight of a base layer of 4 bits, None for another or one that does more than multiply."""
    state = getattr(base._parameters.get("weight"), "quant_state", None)
    if state is None or getattr(state, "quant_type", None) != "nf4" or getattr(state, "packing_format_for_cpu", False):
        return None
    hooks = base._forward_hooks or base._forward_pre_hooks or base._backward_hooks or base._backward_pre_hooks
    if "forward" in base.__dict__ or hooks or _swap.watched_by_all() or len(state.shape) != 2:
        return None
    given = {"absmax": state.absmax, "block_size": state.blocksize}
    if state.nested:
        outer = state.state2
        given |= {"nested_absmax": outer.absmax, "nested_code": outer.code, "nested_offset": state.offset}
        given["nested_block_size"] = outer.blocksize
    return given


def _dropout_of(dropout: nn.Module | None) -> float:
    """The share that is dropped out now."""
    if type(dropout) not in (nn.Identity, nn.Dropout) or "forward" in dropout.__dict__:
        raise Refused(f"its dropout is a {type(dropout).__name__}")
    if dropout._forward_hooks or dropout._forward_pre_hooks or dropout._backward_hooks or dropout._backward_pre_hooks:
        raise Refused("its dropout has hooks")
    if type(dropout) is nn.Identity or not dropout.training:
        return 0.0
    if dropout.p >= 1:
        raise Refused("its dropout leaves nothing")
    return dropout.p


def why_apart(module: nn.Module, adapter: Adapter, x: Tensor) -> str:
    """Why this call must go through the layer's own forward, "" where it need not."""
    weight, bias, a, b = adapter.base.weight, adapter.base.bias, adapter.a.weight, adapter.b.weight
    if adapter.four_bits is not None:
        return _why_apart_in_four_bits(module, adapter, x)
    if not is_plain(x, weight, bias, a, b):
        return "it has, or is given, tensors that are not plain"
    shapes = ((weight, adapter.base), (a, adapter.a), (b, adapter.b))
    if any(t.shape != (each.out_features, each.in_features) for t, each in shapes):
        return "its weights are not whole outside of the layers that hold them"
    if any(t.device != x.device for t in (weight, a, b)):
        return "its weights are on another device"
    if autocast_dtype(x.device.type) is None:
        if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
            return "its base layer has another dtype than what it is given"
        if a.dtype != x.dtype and not getattr(module, "cast_input_dtype_enabled", True):
            return "its adapter has another dtype than what it is given"
    if b.dtype != a.dtype:
        return "its adapter has two dtypes"
    return ""


# Forwards of base layers of 4 bits that were run against the operator.
_verified: set[Any] = set()


def _why_apart_in_four_bits(module: nn.Module, adapter: Adapter, x: Tensor) -> str:
    base, a, b = adapter.base, adapter.a.weight, adapter.b.weight
    tensors = [t for t in adapter.four_bits.values() if isinstance(t, Tensor)]  # type: ignore[union-attr]
    if type(base).forward not in _verified:
        return f"its base layer is a {type(base).__name__} that was not run against the operator"
    if not is_plain(x, base.bias, a, b, *tensors):
        return "it has, or is given, tensors that are not plain"
    num_rows, num_cols = base.out_features, base.in_features
    num_bytes = base.weight.numel() * base.weight.element_size()
    is_whole = tuple(base.weight.quant_state.shape) == (num_rows, num_cols) and 2 * num_bytes - num_rows * num_cols in (
        0,
        1,
    )
    if not is_whole or any(
        t.shape != (each.out_features, each.in_features) for t, each in ((a, adapter.a), (b, adapter.b))
    ):
        return "its weights are not whole outside of the layers that hold them"
    if any(t.device != x.device for t in (base.weight, a, b, *tensors)):
        return "its weights are on another device"
    if not getattr(base, "compute_type_is_set", True):
        return "the dtype that its base layer computes in is not decided yet"
    cast = autocast_dtype(x.device.type)
    if cast is not None and cast != (base.compute_dtype or x.dtype):
        return "its base layer computes in another dtype than that of autocast"
    if cast is None and a.dtype != x.dtype and not getattr(module, "cast_input_dtype_enabled", True):
        return "its adapter has another dtype than what it is given"
    if b.dtype != a.dtype:
        return "its adapter has two dtypes"
    # The reference would keep the whole weight for backward.
    if current_backend() != "torch" and (reasons := why_no_kernels(x.device, x.dtype)):
        return f"there is no kernel for it: {'; '.join(reasons)}"
    return ""


# ---- probing ----

_K, _N, _R = 12, 10, 4


class _Mask(_probe.StandIn):
    """Stand-in for dropout that draws nothing."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.factor = (torch.rand(5, _K, generator=generator) < 0.7) / 0.7

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x.dtype) if self.training else x


def _line(generator: torch.Generator, num_in: int, num_out: int, has_bias: bool = False) -> nn.Linear:
    line = nn.Linear(num_in, num_out, bias=has_bias)
    with torch.no_grad():
        for parameter in line.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return line


class _Layer:
    """Runs of one layer with small children, of which the formula is known."""

    def __init__(self, module: nn.Module, parts: Parts, generator: torch.Generator) -> None:
        self.module, self.name, self.generator = module, adapter_of(module).name, generator
        self.base = _line(generator, _K, _N, parts.has_bias)
        self.a, self.b, self.mask = _line(generator, _K, _R), _line(generator, _R, _N), _Mask(generator)
        self.scaling = 0.5 + float(torch.rand((), generator=generator))

    def draw(self, scale: float = 1.0) -> Tensor:
        return torch.randn(5, _K, generator=self.generator) * scale

    def native(self, x: Tensor, training: bool) -> Tensor:
        for each in (self.base, self.a, self.b, self.mask):
            each.train(training)
        adapter = dict(zip(_CHILDREN[1:], (self.a, self.b, self.mask), strict=True))
        children = {
            **self.module._modules,
            "base_layer": self.base,
            **{name: nn.ModuleDict({self.name: child}) for name, child in adapter.items()},
        }
        scaling = {**self.module.scaling, self.name: self.scaling}
        twin = _probe.twin(self.module, children=children, attributes={"scaling": scaling}, training=training)
        return _form.run(twin, x)

    def expected(self, x: Tensor, training: bool) -> Tensor:
        given = self.base.weight, self.a.weight, self.b.weight
        y = lora_linear_reference(x, *given, bias=self.base.bias, scaling=self.scaling)
        if not training:
            return y
        h = self.mask(x.to(self.a.weight.dtype))
        low = F.linear(F.linear(h, self.a.weight), self.b.weight) * self.scaling
        return (F.linear(x, self.base.weight, self.base.bias) + low).to(y.dtype)

    def leaves(self) -> list[Tensor]:
        return [self.base.weight, self.a.weight, self.b.weight, *([] if self.base.bias is None else [self.base.bias])]


def verify(module: nn.Module, parts: Parts, generator: torch.Generator) -> Found:
    if parts.why:
        raise Refused(parts.why)
    argument_of(module)
    if parts.base is not None:
        _verify_base(adapter_of(module), generator)
    layer = _Layer(module, parts, generator)
    for training in (False, True):
        for scale in (1.0, 1e-2, 1e3):
            x = layer.draw(scale)
            if not _probe.same(layer.native(x, training), layer.expected(x, training)):
                raise Refused("it computes something else than a layer and its adapter")
        inputs = [layer.draw().requires_grad_(), *layer.leaves()]
        upstream = torch.randn(5, _N, generator=generator)
        runs = (run(inputs[0], training) for run in (layer.native, layer.expected))
        native, expected = (_probe.gradients(y, inputs, upstream) for y in runs)
        if not _probe.same_gradients(expected, native):
            raise Refused("its gradient is not that of the formula it computes")
    x = layer.draw()
    exact = layer.expected(x, False)
    layer.base.bfloat16()
    for _ in ("an fp32 adapter", "a bf16 adapter"):
        x16 = x.bfloat16()
        if not _probe.no_worse(layer.expected(x16, False), layer.native(x16, False), exact):
            raise Refused("it computes bf16 inputs in another precision")
        layer.a.bfloat16()
        layer.b.bfloat16()
    return Found("adapter" if parts.base is None else "adapter of 4 bits", LoraSettings())


def _verify_base(adapter: Adapter, generator: torch.Generator) -> None:
    """Run a base layer of 4 bits as it is, on a few rows: nobody else knows how its bytes were made."""
    base, twin = adapter.base, object.__new__(type(adapter.base))
    # What it notes about its calls is the twin's own.
    twin.__dict__.update({k: dict(v) if type(v) is dict else v for k, v in base.__dict__.items()})
    dtype = getattr(base, "compute_dtype", None) or torch.float32
    x = torch.randn(3, base.in_features, generator=generator).to(base.weight.device, dtype)
    with torch.no_grad():
        y = _probe.explained(type(base).forward, twin, x)
        expected = F.linear(x, _weight_of(adapter, dtype), None if base.bias is None else base.bias.to(dtype))
    if not _probe.same(y.cpu(), expected.cpu(), tolerance=8 * torch.finfo(dtype).eps):
        raise Refused("its base layer computes something else than a product with a weight of 4 bits")
    _verified.add(type(base).forward)


def _packed(adapter: Adapter) -> Tensor:
    return adapter.base.weight.detach()


def _weight_of(adapter: Adapter, dtype: torch.dtype) -> Tensor:
    shape = adapter.base.out_features, adapter.base.in_features
    return dequantize_nf4(_packed(adapter), shape=shape, dtype=dtype, **adapter.four_bits)  # type: ignore[arg-type]


# ---- replacing ----


def replacement(module: nn.Module) -> Callable[..., Any]:
    return _swap.like(forward, type(module).forward, argument_of(module))


def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    x = real(x)
    if args or kwargs:
        return type(self).forward(self, x, *args, **kwargs)
    try:
        adapter = adapter_of(self)
        why = why_apart(self, adapter, x)
    except Refused as refused:
        why = str(refused)
    if why:
        note(f"{NAME} is off in {type(self).__name__}: {why}")
        return type(self).forward(self, x)
    base, low = adapter.base, (adapter.a.weight, adapter.b.weight)
    options = {"bias": base.bias, "scaling": adapter.scaling, "dropout": adapter.dropout}
    if adapter.four_bits is None:
        return lora_linear(x, base.weight, *low, **options)
    options |= {k: v for k, v in adapter.four_bits.items() if k != "absmax"}
    return nf4_lora_linear(
        x, _packed(adapter), adapter.four_bits["absmax"], *low, compute_dtype=base.compute_dtype, **options
    )
