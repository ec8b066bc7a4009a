"""A layer that adds a branch to its input and normalises the sum: the norm does the addition.

Nothing of the layer is replaced: its own forward gets its input as a `Stream`, the norm that takes the sum computes
both, and what leaves the layer are tensors. It is asked for by name, since a layer is more than a form: what it does
with its input when it is called in another way than in the trial run is not seen.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.rms_norm import rms_norm_reference
from . import _norms, _probe, _swap
from ._deferred import Deferred, real
from ._form import Found, Match, argument_of, is_plain, own, refuse_unseen, required_arguments_of
from ._probe import Refused
from ._stream import Stream

NAME = "add_rms_norm"


class AddNormSettings(NamedTuple):
    """Children that are given the stream, and of these the norms that add."""

    takers: tuple[str, ...]
    norms: tuple[str, ...]


# ---- matching ----


def match(module: nn.Module, norms: dict[str, Found]) -> Match:
    """`norms` are the children that are replaced RMS norms. A layer has two blocks, each with its norm."""
    children = own(module._modules).values()
    # What holds a list is a model of layers.
    if not norms or any(isinstance(each, (nn.ModuleList, nn.ModuleDict)) for each in (module, *children)):
        return "no"
    blocks = [child for child in children if child._modules and not _probe.sizes_of(child)]
    return "sure" if len(norms) > 1 and len(blocks) > 1 else "maybe"


def opaque(module: nn.Module, norms: dict[str, Found]) -> list[str]:
    """Its blocks: children that are neither replaced norms nor without any numbers, as dropout is."""
    children = own(module._modules).items()
    return [name for name, child in children if name not in norms and any(True for _ in child.parameters())]


# ---- probing ----

# A size that no result of a block is unpacked into.
_BATCH = 5
# How many results besides the tensor a block may have; a tensor that is unpacked or indexed would pass for a tuple.
_MORE = (1, 2, 0)


class Block(_probe.StandIn):
    """Stand-in for attention, an MLP and whatever else computes a branch."""

    def __init__(self, width: int, more: int, generator: torch.Generator) -> None:
        super().__init__()
        self.scale, self.more = nn.Parameter(torch.randn(width, generator=generator)), more
        # What is deferred among its arguments.
        self.given: list[Deferred] = []

    @property
    def took_stream(self) -> bool:
        return any(isinstance(value, Stream) for value in self.given)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        self.given += [value for value in given if isinstance(value, Deferred)]
        x = next(value for value in real(given) if isinstance(value, Tensor))
        y = torch.tanh(x * self.scale + x.roll(1, -1))
        return (y, *[None] * self.more) if self.more else y


class Run(NamedTuple):
    results: list[Tensor]
    grads: list[Tensor | None]


class Layer:
    """Runs of one layer with its norms and stand-ins for everything else."""

    def __init__(self, module: nn.Module, norms: dict[str, Found], generator: torch.Generator) -> None:
        self.module, self.norms, self.generator = module, norms, generator
        self.argument = argument_of(module)
        widths = {_probe.shape_of(p) for name in norms for p in own(module._modules[name]._parameters).values()}
        if not widths and isinstance(module.__dict__.get("hidden_size"), int):
            widths = {(module.hidden_size,)}
        if len(widths) != 1:
            raise Refused("its norms have no width in common" if widths else "no weight of its norms tells its width")
        ((self.width,),) = widths
        self.weights = {
            name: {key: self._random(p) for key, p in own(module._modules[name]._parameters).items()} for name in norms
        }
        self.parameters = {name: self._random(p) for name, p in own(module._parameters).items()}
        self.buffers = {name: self._random(b) for name, b in own(module._buffers).items()}
        self.x = torch.randn(_BATCH, 6, self.width, generator=generator)
        self.upstream = torch.randn(self.x.shape, generator=generator)
        self.took: dict[str, bool] = {}

    def _random(self, tensor: Tensor) -> Tensor:
        shape = _probe.shape_of(tensor)
        return torch.randn(shape, generator=self.generator) if tensor.is_floating_point() else torch.zeros(shape).long()

    def twin(self, blocks: dict[str, Block], forwards: Callable[[str], Any], training: bool) -> nn.Module:
        """A fresh copy of the layer; `forwards` gives the norms other forwards than their own."""
        children: dict[str, Any] = {}
        for name, child in self.module._modules.items():
            if child is None or name in blocks:
                children[name] = blocks.get(name)
                continue
            children[name] = _probe.twin(child, parameters=self.weights.get(name), training=training)
            if forwards(name) is not None:
                found = self.norms[name]
                children[name].__dict__["_tigon"] = _swap.Installed("rms_norm", "", found.settings, "forward", ())
                children[name].__dict__["forward"] = types.MethodType(forwards(name), children[name])
        return _probe.twin(
            self.module, parameters=self.parameters, buffers=self.buffers, children=children, training=training
        )

    def run(self, layer: nn.Module, blocks: dict[str, Block], x: Any, leaf: Tensor) -> Run:
        others = {name: None for name in required_arguments_of(self.module) if name != self.argument}
        # What is dropped out is the same in every run.
        torch.random.default_generator.manual_seed(0)
        forward = functools.partial(type(layer).forward, layer, **{self.argument: x, **others})
        results = real(_probe.watched(layer, forward, draws=True))
        results = [results] if isinstance(results, Tensor) else results
        if not isinstance(results, (tuple, list)) or not results or not isinstance(results[0], Tensor):
            raise Refused(f"its forward returns {type(results).__name__}, the form a tensor first")
        if results[0].shape != self.x.shape:
            raise Refused(f"its forward makes {tuple(results[0].shape)} of {tuple(self.x.shape)}")
        scales = [block.scale for block in blocks.values()]
        weights = [p for name in self.norms for p in layer._modules[name].parameters()]  # type: ignore[union-attr]
        leaves = [leaf, *scales, *weights, *layer._parameters.values()]
        leaves = [each for each in leaves if each is not None]
        return Run([r for r in results if isinstance(r, Tensor)], _probe.gradients(results[0], leaves, self.upstream))

    def native(self, training: bool) -> tuple[Run, dict[str, Block]]:
        """The first run that works, with what the blocks have to return for it."""
        names, refused = opaque(self.module, self.norms), None
        if len(names) > 4:
            raise Refused(f"it has {len(names)} blocks")
        for more in itertools.product(_MORE, repeat=len(names)):
            blocks = {n: Block(self.width, m, self.generator) for n, m in zip(names, more, strict=True)}
            x = self.x.clone().requires_grad_()
            try:
                return self.run(self.twin(blocks, lambda name: None, training), blocks, x, x), blocks
            except _probe.LeavesTraces:
                raise
            except Refused as error:
                refused = refused or error
        raise Refused(f"it does not run on stand-ins for its blocks: {refused or 'it has none'}")

    def fused(self, blocks: dict[str, Block], training: bool) -> tuple[Run, AddNormSettings]:
        takers, adding = {}, {}

        def forward_of(name: str) -> Any:
            def op(*args: Any, residual: Tensor | None = None, **kwargs: Any) -> Any:
                adding[name] = adding.get(name, False) or residual is not None
                return rms_norm_reference(*args, residual=residual, **kwargs)

            def forward(norm: nn.Module, x: Any) -> Any:
                takers[name] = takers.get(name, False) or isinstance(x, Stream)
                return _norms.rms_norm_by(op, norm, x)

            return forward if name in self.norms else None

        leaf = self.x.clone().requires_grad_()
        run = self.run(self.twin(blocks, forward_of, training), blocks, Stream(leaf), leaf)
        names = [name for name, block in blocks.items() if block.took_stream]
        norms = tuple(name for name, adds in adding.items() if adds)
        if not norms:
            raise Refused("no norm takes a sum that it makes")
        if names:
            raise Refused(f"its {', '.join(names)} takes what a norm takes too")
        return run, AddNormSettings(tuple(name for name, took in takers.items() if took), norms)


def verify(module: nn.Module, norms: dict[str, Found], generator: torch.Generator) -> Found:
    refuse_unseen(module)
    layer = Layer(module, norms, generator)
    settings = [_agreed(layer, training) for training in (False, True)]
    if settings[0] != settings[1]:
        raise Refused("its norms take other sums in training")
    return Found(", ".join(settings[0].norms), settings[0])


def _agreed(layer: Layer, training: bool) -> AddNormSettings:
    native, blocks = layer.native(training)
    fused, settings = layer.fused(blocks, training)
    same = len(native.results) == len(fused.results) and all(
        _probe.same(a, b) for a, b in zip(fused.results, native.results, strict=True)
    )
    if not same or not _probe.same_gradients(fused.grads, native.grads):
        raise Refused("it does not compute the same with its input as a stream")
    return settings


# ---- replacing ----


def replacement(module: nn.Module) -> Callable[..., Any]:
    return _swap.like(forward, type(module).forward, argument_of(module))


def forward(self: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
    settings = self._tigon.settings
    # A compiler does such fusions itself, or sees operators it cannot.
    if torch.compiler.is_compiling() or not is_plain(x) or not _swap.ours_unwatched(self, settings.takers, "rms_norm"):
        return type(self).forward(self, x, *args, **kwargs)
    return real(type(self).forward(self, Stream(x), *args, **kwargs))
