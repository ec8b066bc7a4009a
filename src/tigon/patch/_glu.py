"""Gated MLPs: two projections, or one to both halves, an activation, a product, and a projection back."""

from __future__ import annotations

import inspect
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.glu import glu, glu_reference
from . import _probe
from ._deferred import real
from ._form import Found, Match, are_as_probed, argument_of, arguments_of, is_plain, own, passed_over, run, shown
from ._gate import Gate, choose, gates, numbers_of
from ._normed import Normed, through
from ._probe import Refused


class GluSettings(NamedTuple):
    """Names of the projections; `up` is None when `gate` projects to both halves."""

    gate: str
    up: str | None
    down: str
    how: Gate
    # The attribute that the result is multiplied by.
    scale: str | None = None
    # A child between the product and `down`, such as a norm.
    inner: str | None = None
    # Whether the product is cast to the dtype of the weight of `down`.
    casts: bool = False
    # Attributes with the values at which it was probed, if at others it computes something else.
    only_at: tuple[tuple[str, float], ...] = ()
    # Children that are not called any more.
    passed_over: tuple[tuple[str, type], ...] = ()

    @property
    def variant(self) -> str:
        notes = [*self.how.notes(self.up is None), "scaled" if self.scale else "", "inner module" if self.inner else ""]
        return ", ".join(note for note in notes if note)


# ---- matching ----


def _projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    sizes = {name: _probe.sizes_of(child) for name, child in module._modules.items()}
    return {name: size for name, size in sizes.items() if size}


def _roles(sizes: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str | None, str]]:
    """Every (gate, up, down) that the shapes allow; `up` is None for a packed projection."""
    if len(sizes) == 3:
        for gate, up, down in itertools.permutations(sizes):
            if sizes[gate] == sizes[up] == sizes[down][::-1]:
                yield gate, up, down
    elif len(sizes) == 2:
        for gate, down in itertools.permutations(sizes):
            if sizes[gate] == (sizes[down][1], 2 * sizes[down][0]):
                yield gate, None, down


def match(module: nn.Module) -> Match:
    sizes = _projections(module)
    if not any(True for _ in _roles(sizes)):
        return "no"
    others = [child for name, child in module._modules.items() if name not in sizes and child is not None]
    activations = [c for c in others if not isinstance(c, nn.Dropout) and not any(True for _ in c.parameters())]
    functions = [v for v in module.__dict__.values() if inspect.isfunction(v) or inspect.isbuiltin(v)]
    # Attention and mixers have projections of such shapes too, but no activation, or more to their forward.
    return "sure" if (activations or functions) and len(arguments_of(module)) <= 2 else "maybe"


# ---- probing ----


def verify(module: nn.Module, generator: torch.Generator) -> Found:
    argument_of(module)
    if any(argument.default is not None for argument in arguments_of(module)[1:]):
        raise Refused(f"its forward takes ({shown(arguments_of(module))}), the form one tensor")
    if own(module._parameters) or own(module._buffers):
        raise Refused("it has parameters or buffers of its own, which the form does not know")
    inner = _with_parameters(module, _projections(module))
    return in_small(module, lambda sizes: _chosen(Mlp(module, generator, inner, sizes)))


def in_small(module: nn.Module, probe: Callable[[tuple[int, int]], Found]) -> Found:
    """What `probe` finds at small sizes, hidden and intermediate, or at those that the module has."""
    projections = _projections(module)
    intermediate, hidden = projections[next(_roles(projections))[2]]
    try:
        return probe(_small(hidden, intermediate))
    except Refused:
        # Numbers in the module may depend on its sizes; at full size there is nothing to guess.
        if hidden * intermediate > 2**22:
            raise
        return probe((hidden, intermediate))


def _with_parameters(module: nn.Module, sizes: dict[str, tuple[int, int]]) -> str | None:
    """The name of the one child, besides the projections, that has parameters or buffers."""
    found = []
    for name, child in own(module._modules).items():
        if name in sizes:
            continue
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in child.modules()):
            raise Refused(f"its child {name} drops out elements in training")
        if any(True for _ in child.parameters()) or any(True for _ in child.buffers()):
            found.append(name)
    if len(found) > 1:
        raise Refused(f"its children {', '.join(found)} have parameters or buffers, which the form does not know")
    return found[0] if found else None


def _small(hidden: int, intermediate: int) -> tuple[int, int]:
    """Sizes for the probe that keep the relations attributes could stand in."""
    if hidden == intermediate:
        return 8, 8
    return 8, {hidden: 4}.get(2 * intermediate, {intermediate: 16}.get(2 * hidden, 12))


class Mlp:
    """Runs of one MLP with stand-ins for its projections, in small."""

    def __init__(
        self, module: nn.Module, generator: torch.Generator, inner: str | None, small: tuple[int, int]
    ) -> None:
        sizes = _projections(module)
        intermediate, hidden = sizes[next(_roles(sizes))[2]]
        resized = {hidden: small[0], intermediate: small[1], 2 * intermediate: 2 * small[1]}
        self.module, self.generator, self.inner, self.width = module, generator, inner, small[0]
        self.attributes = {k: resized[v] for k, v in module.__dict__.items() if type(v) is int and v in resized}
        self.lines = {
            name: _probe.Projection(resized[fan_in], resized[fan_out], generator)
            for name, (fan_in, fan_out) in sizes.items()
        }
        if inner is not None:
            # Whatever it does, it does it in both: all that matters is what it is called with.
            self.lines[inner] = _probe.Projection(small[1], small[1], generator)

    def draw(self, scale: float = 1.0) -> Tensor:
        return torch.randn(2, 32, self.width, generator=self.generator) * scale

    def native(self, x: Tensor, training: bool = False, **numbers: float) -> Any:
        children = {
            name: self.lines.get(name) or _probe.twin(child, training=training)
            for name, child in own(self.module._modules).items()
        }
        children = {name: children.get(name) for name in self.module._modules}
        for line in self.lines.values():
            line.dtype = line.dtype if line.strict else x.dtype
        attributes = {**self.attributes, **numbers}
        y = run(_probe.twin(self.module, children=children, attributes=attributes, training=training), x)
        if isinstance(y, Tensor) and bool(y.isnan().any()):
            raise Refused("it reads the weights of its projections, not only what they return")
        return y

    def reference(self, x: Tensor, mlp: GluSettings, **numbers: float) -> Tensor:
        values = with_numbers(self.module, numbers)
        up = None if mlp.up is None else self.lines[mlp.up](x)
        y = mlp.how.call(glu_reference, values, self.lines[mlp.gate](x), up)
        return _onward(mlp, values, y, self.lines[mlp.inner] if mlp.inner else None, self.lines[mlp.down])

    def leaves(self) -> list[Tensor]:
        return [line.matrix for line in self.lines.values()]


def with_numbers(module: nn.Module, numbers: dict[str, float]) -> types.SimpleNamespace:
    """The attributes of a module, some of them with other values."""
    return types.SimpleNamespace(**{**module.__dict__, **numbers})


def _chosen(mlp: Mlp) -> Found:
    module, inner = mlp.module, mlp.inner
    roles = list(_roles(_projections(module)))
    candidates = [
        GluSettings(gate, up, down, how, scale, inner)
        for how in gates(module, packed=roles[0][1] is None)
        for gate, up, down in roles
        for scale in (None, *numbers_of(module))
        if scale is None or scale not in how
    ]
    candidates.sort(key=lambda settings: settings.variant.count(","))
    try:
        settings, only_at = choose(mlp, candidates)
    except Refused as refused:
        if inner is None:
            raise
        reason = f"its child {inner} has parameters or buffers, and is not called on the product alone"
        raise Refused(reason) from refused
    called = (settings.gate, settings.up, settings.down, settings.inner)
    settings = settings._replace(only_at=only_at, casts=_casts(mlp, settings), passed_over=passed_over(module, called))
    return Found(settings.variant, settings)


def _casts(mlp: Mlp, settings: GluSettings) -> bool:
    """Whether a `down` that is kept in fp32 gets what it needs."""
    down = mlp.lines[settings.down]
    down.dtype, down.strict = torch.float32, True
    try:
        y = mlp.native(mlp.draw().to(torch.bfloat16))
    except Refused:
        return False
    finally:
        down.strict = False
    return isinstance(y, Tensor) and y.dtype == torch.float32


# ---- replacing ----


def forward(self: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    mlp = self._tigon.settings
    if not is_known(self, mlp, *args, *kwargs.values()):
        return type(self).forward(self, real(x), *args, **kwargs)
    if type(x) is Normed:
        y, x = through(self, mlp, x)
        if y is not None:
            return y
    return from_halves(self, mlp, *halves(self, mlp, x))


def is_known(self: nn.Module, mlp: GluSettings, *others: Any) -> bool:
    """Whether a call, with these arguments besides the first, is one that the probe stands for."""
    changed = any(getattr(self, name) != value for name, value in mlp.only_at)
    return not changed and all(value is None for value in others) and are_as_probed(self, mlp.passed_over)


def halves(self: nn.Module, mlp: GluSettings, x: Tensor) -> tuple[Tensor, Tensor | None]:
    return getattr(self, mlp.gate)(x), None if mlp.up is None else getattr(self, mlp.up)(x)


def from_halves(self: nn.Module, mlp: GluSettings, gate: Tensor, up: Tensor | None) -> Tensor:
    y = mlp.how.call(glu if is_plain(gate, up) else glu_reference, self, gate, up)
    return _onward(mlp, self, y, getattr(self, mlp.inner) if mlp.inner else None, getattr(self, mlp.down))


def _onward(mlp: GluSettings, values: Any, y: Tensor, inner: nn.Module | None, down: nn.Module) -> Tensor:
    y = y if inner is None else inner(y)
    # Of some projections there is none to be asked for.
    weight = getattr(down, "weight", None) if mlp.casts else None
    if isinstance(weight, Tensor) and weight.is_floating_point():
        y = y.to(weight.dtype)
    return scaled(mlp, values, down(y))


def scaled(mlp: GluSettings, values: Any, y: Tensor) -> Tensor:
    return y if mlp.scale is None else y * getattr(values, mlp.scale)
