"""What the forward of a class computes, found by running it once on a few numbers.

A layer that takes the place of a forward knows the host's class alone. Hosts under one name differ: in where they
round, in whether the weight is stored minus one, in how wide the tables are. So each layer asks here, once for each
class, which of the known formulae its host is, and leaves a host that is none of them its own forward.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..ops._device import constant_while_compiling
from ..ops.glu import ACTIVATIONS
from ..ops.rms_norm import CASTS, rms_norm_reference
from ..ops.rms_norm_gated import CASTS as GATED_CASTS
from ..ops.rms_norm_gated import rms_norm_gated_reference
from ..ops.rope import LAYOUTS, rope_reference

logger = logging.getLogger("tigon")
F = TypeVar("F", bound=Callable[..., Any])

# Where hosts keep the number that is added to the mean square.
EPS = ("variance_epsilon", "eps")
# Dtypes of the input and of the weight at which casts differ.
_DTYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


def found_once(find: F) -> F:
    """`find`, a function of constants, called once for each and without whatever surrounds the call; None if it raises.

    A compiler takes the result for a constant.
    """
    results: dict[Any, Any] = {}

    @constant_while_compiling
    @functools.wraps(find)
    def found(*key: Any) -> Any:
        if key not in results:
            try:
                with _alone():
                    results[key] = find(*key)
            except Exception as error:
                logger.debug("tigon: %s%r: %s: %s", find.__name__, key, type(error).__name__, error)
                results[key] = None
        return results[key]

    return found  # type: ignore[return-value]


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Outside of the modes with which a model is traced, or built without memory."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@constant_while_compiling
def note(host: type, layer: str) -> None:
    """Say once that a host keeps its own forward.

    Raises:
        TypeError: it has none but the layer's.
    """
    if is_ours(host):
        raise TypeError(f"{layer} takes the place of a forward, and {host.__name__} has no other")
    if (host, layer) not in _noted:
        _noted.add((host, layer))
        logger.warning(
            "tigon: %s.%s computes nothing that the layer %s knows; its own forward runs",
            host.__module__,
            host.__qualname__,
            layer,
        )


_noted: set[tuple[type, str]] = set()


def is_ours(host: type) -> bool:
    """Whether the forward of a class is a layer's, which then has no host to ask or to fall back on."""
    return (getattr(host.forward, "__module__", None) or "").startswith(__name__.rpartition(".")[0] + ".")


def _draws(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def _stand_in(host: type, **attributes: Any) -> nn.Module:
    if is_ours(host):
        raise TypeError(f"{host.__name__} is no host")
    module = object.__new__(host)
    nn.Module.__init__(module)
    module.train(False)
    for name, value in attributes.items():
        value = nn.Parameter(value, requires_grad=False) if isinstance(value, Tensor) else value
        setattr(module, name, value)
    return module


def _is_close(y: Any, expected: Tensor) -> bool:
    if not isinstance(y, Tensor) or y.shape != expected.shape or y.dtype != expected.dtype:
        return False
    return torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


def _is_rounded_alike(y: Tensor, expected: Tensor) -> bool:
    """Whether the same roundings were done: results that differ are those that fell the other way by their last bit."""
    if y.dtype != expected.dtype:
        return False
    if y.dtype == torch.float32:
        return torch.allclose(y, expected, rtol=1e-5, atol=1e-5)
    return bool((y != expected).float().mean() <= 0.02)


# ---- norms ----


@found_once
def norm_form(host: type) -> tuple[str, float, str] | None:
    """Name of the attribute with eps, offset of the weight, and cast, of an RMS norm."""
    draw = _draws()
    x, weight = draw(64, 32) * 1.5, 1 + 0.5 * draw(32)
    numbers = {"variance_epsilon": 0.25, "eps": 0.75}

    def native(x: Tensor, weight: Tensor) -> Any:
        return host.forward(_stand_in(host, weight=weight, **numbers), x)

    y = native(x, weight)
    for eps, offset in itertools.product(EPS, (0.0, 1.0)):
        form = functools.partial(rms_norm_reference, eps=numbers[eps], offset=offset)
        if not _is_close(y, form(x, weight)):
            continue
        for cast in CASTS:
            pairs = [(x.to(dtype), weight.to(of_weight)) for dtype, of_weight in _DTYPES]
            if all(_is_rounded_alike(native(*pair), form(*pair, cast=cast)) for pair in pairs):
                return eps, offset, cast
    return None


@found_once
def gated_norm_form(host: type, activation: str | None) -> tuple[str, str, bool, str] | None:
    """Name of the attribute with eps, activation, whether the gate comes after the norm, and cast, of a gated norm."""
    draw = _draws()
    x, gate, weight = draw(64, 32) * 1.5, draw(64, 32), 1 + 0.5 * draw(32)
    numbers = {"variance_epsilon": 0.25, "eps": 0.75}
    attributes = {**numbers, "hidden_size": 32, **({} if activation is None else {"activation": activation})}

    def native(x: Tensor, weight: Tensor, gate: Tensor) -> Any:
        return host.forward(_stand_in(host, weight=weight, **attributes), x, gate)

    y = native(x, weight, gate)
    for eps, act, norm_first in itertools.product(EPS, ACTIVATIONS, (True, False)):
        form = functools.partial(
            rms_norm_gated_reference, eps=numbers[eps], activation=act, norm_before_gate=norm_first
        )
        if not _is_close(y, form(x, weight, gate)):
            continue
        for cast in GATED_CASTS:
            triples = [(x.to(dtype), weight.to(of_weight), gate.to(dtype)) for dtype, of_weight in _DTYPES]
            if all(_is_rounded_alike(native(*three), form(*three, cast=cast)) for three in triples):
                return eps, act, norm_first, cast
    return None


# ---- rotary embedding ----


@found_once
def rope_form(host: type, is_half: bool) -> tuple[str, bool, bool] | None:
    """Layout of the pairs, whether they turn backwards, and whether the result has the dtype of q and k.

    With tables of half the columns of a head, or all of them.
    """
    draw = _draws()
    q, k = draw(2, 4, 3, 8), draw(2, 2, 3, 8)
    columns = 4 if is_half else 8
    cos, sin = draw(2, 3, columns), draw(2, 3, columns)
    module = _stand_in(host)

    def native(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        turned = host.forward(module, q, k, cos, sin, unsqueeze_dim)
        if not isinstance(turned, tuple) or len(turned) != 2:
            raise ValueError("it returns something else than two tensors")
        return turned

    def is_form(form: tuple[str, bool]) -> bool:
        layout, inverse = form
        options = {"layout": layout, "inverse": inverse, "tables": "half" if is_half else "full"}
        for dim in (1, 2):
            inputs = (q, k, cos, sin) if dim == 1 else (q.transpose(1, 2), k.transpose(1, 2), cos, sin)
            if not all(map(_is_close, native(*inputs, dim), rope_reference(*inputs, **options, unsqueeze_dim=dim))):
                return False
        return True

    form = next(filter(is_form, itertools.product(LAYOUTS, (False, True))), None)
    if form is None:
        return None
    low = q.bfloat16(), k.bfloat16()
    # With tables in fp32 some give fp32, as the sum promotes, and some what they were given.
    same, promoted = native(*low, cos.bfloat16(), sin.bfloat16()), native(*low, cos, sin)
    if any(y.dtype != torch.bfloat16 for y in same) or promoted[0].dtype != promoted[1].dtype:
        return None
    return (*form, promoted[0].dtype == torch.bfloat16) if promoted[0].dtype in (torch.bfloat16, cos.dtype) else None


# ---- gated MLPs ----


class _Other(nn.Module):
    """An activation that no host can have by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x) + 0.25


def _linear(matrix: Tensor) -> nn.Linear:
    line = _stand_in(nn.Linear, weight=matrix, bias=None)
    line.out_features, line.in_features = matrix.shape
    return line  # type: ignore[return-value]


@found_once
def is_gated_mlp(host: type) -> bool:
    """Whether a class computes `down_proj(act_fn(gate_proj(x)) * up_proj(x))`, whatever `act_fn` is."""
    draw = _draws()
    gate, up, down = (_linear(matrix) for matrix in (draw(12, 8), draw(12, 8), draw(8, 12)))
    module = _stand_in(host, gate_proj=gate, up_proj=up, down_proj=down, act_fn=_Other())
    x = draw(2, 5, 8)
    return _is_close(host.forward(module, x), down(module.act_fn(gate(x)) * up(x)))


def activation_of(act: Any) -> str | None:
    """Name of an activation module or function among those of `glu`, None if it is another."""
    if isinstance(act, nn.Module):
        return _activation_of_class(type(act), getattr(act, "approximate", None))
    return _activation_of_function(act)


def _named(act: Callable[[Tensor], Tensor]) -> str | None:
    x = torch.linspace(-8, 8, 257, dtype=torch.float64, device="cpu")
    y = act(x)
    same = (name for name, known in ACTIVATIONS.items() if torch.allclose(y, known.reference(x), rtol=0, atol=1e-9))
    return next(same, None)


@found_once
def _activation_of_class(kind: type, approximate: str | None) -> str | None:
    act = kind() if approximate is None else kind(approximate=approximate)
    # What a number in an instance may be is not known from its class.
    plain = nn.Module().__dict__
    settings = {k: v for k, v in act.__dict__.items() if k not in plain and k not in ("inplace", "approximate")}
    if any(isinstance(value, (bool, int, float, str, Tensor)) for value in settings.values()):
        return None
    return None if any(True for _ in act.parameters()) else _named(lambda x: kind.forward(act, x))


@found_once
def _activation_of_function(act: Callable[[Tensor], Tensor]) -> str | None:
    return _named(act)
