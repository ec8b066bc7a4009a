"""Walk a model, decide for every module, swap, remember, undo."""

from __future__ import annotations

import fnmatch
import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from . import _add_norm, _dispatch, _glu_linear, _head, _hf, _lora, _norm_mlp, _probe, _qk_norm_rope, _rope, _swap
from ._forms import FORM_NAMES, FORMS, FUSIONS, Found, argument_of
from ._probe import Refused
from .report import LOSS, Report, Verdict, grouped

logger = logging.getLogger("tigon")

# The probe sets torch's default dtype and random state, and a swap takes several steps: one thread at a time.
# Reentrant, since a model may be patched while another is being built or probed.
lock = threading.RLock()


def _one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return call


class _Finding(NamedTuple):
    """What was decided about one module, and how to carry it out."""

    name: str
    cls: str
    form: str
    variant: str
    verdict: Verdict
    reason: str
    act: Callable[[], None] | None = None
    found: Found | None = None


class _Choice:
    """The forms and modules that `only` and `skip` leave, and the fusions that are asked for."""

    def __init__(
        self, only: Iterable[str] | None, skip: Iterable[str] | None, fuse: list[str], names: list[str]
    ) -> None:
        self.fuse = fuse
        self.only = None if only is None else self._split("only", only, names)
        self.skip = self._split("skip", skip or (), names)

    @staticmethod
    def _split(argument: str, items: Iterable[str], names: list[str]) -> tuple[set[str], list[str]]:
        if not isinstance(items, Iterable):
            raise ValueError(f"patch: {argument}: expected names or patterns, got {items!r}")
        items = [items] if isinstance(items, str) else list(items)
        if argument == "only" and not items:
            raise ValueError("patch: only: expected at least one name or pattern, or None for all, got none")
        forms = {item for item in items if item in FORM_NAMES}
        globs = [item for item in items if item not in forms]
        for glob in globs:
            if not isinstance(glob, str) or not fnmatch.filter(names, glob):
                raise ValueError(
                    f"patch: {argument}: expected forms ({', '.join(FORM_NAMES)}) or patterns of module names"
                    f" in this model, got {glob!r}"
                )
        return forms, globs

    def allows(self, form: str, *names: str) -> bool:
        def hits(globs: list[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in globs)

        if form in self.skip[0] or hits(self.skip[1]):
            return False
        if self.only is None:
            return True
        forms, globs = self.only
        return (not forms or form in forms or form in self.fuse) and (not globs or hits(globs))


def _fusions(fuse: Iterable[str]) -> list[str]:
    names = [fuse] if isinstance(fuse, str) else list(fuse) if isinstance(fuse, Iterable) else [fuse]
    for name in names:
        if name not in FUSIONS:
            raise ValueError(f"patch: fuse: expected some of {', '.join(FUSIONS)}, got {name!r}")
    return names


def _with_mode(finding: _Finding, model: nn.Module, mlp: str | None) -> _Finding:
    """Say of a fused MLP what it keeps, unless that is the default."""
    if finding.form != _norm_mlp.NAME or finding.verdict != "replaced":
        return finding
    if mlp is None:
        mark = model.get_submodule(finding.name).__dict__.get("_tigon")
        mlp = getattr(mark and mark.settings, "mlp", "saved")
    return finding if mlp == "saved" else finding._replace(variant=f"{finding.variant}, {mlp}")


def _with_mlp(fuse: list[str], mlp: str | None) -> list[str]:
    """The fusions, with that of which `mlp` is an option."""
    return fuse if mlp is None or _norm_mlp.NAME in fuse else [*fuse, _norm_mlp.NAME]


@_one_at_a_time
def patch(
    model: nn.Module,
    *,
    only: Iterable[str] | None = None,
    skip: Iterable[str] | None = None,
    fuse: Iterable[str] = (),
    strict: bool = False,
    loss_options: Mapping[str, Any] | None = None,
    mlp: str | None = None,
) -> Report:
    """Make a model use the fused operators wherever it computes exactly what they do.

    Every module that looks like a known form is run against the operators' references on random numbers; those
    that agree get a new `forward` on the instance. Classes, parameters, `state_dict` and other models stay as
    they are. In training with labels a causal language model then returns a loss and no logits
    (`skip_logits=False` in the call brings them back, `skip_logits=True` saves them in evaluation too).

    Args:
        model: any module; wrappers (adapters, data parallel) are looked through.
        only: names of forms or patterns of module names; of each kind given, one must fit.
        skip: names of forms or patterns of module names to leave alone.
        fuse: what to compute together across modules, nothing by default: "add_rms_norm", in a layer the addition to
            the residual stream and the RMS norm of the sum; "qk_norm_rope", in attention the norms of queries and
            keys and their rotation; "glu_linear", in a gated MLP the product and the projection back, if that is a
            plain `nn.Linear`, so that no product is kept for backward; "rms_norm_mlp", in a layer the RMS norm and the
            gated MLP that alone takes it, so that neither norm nor product is kept, instead of "add_rms_norm" there;
            "lora_linear", a linear layer and its low-rank adapter, whose dropout then draws its own random numbers.
            Each is verified in a trial run of the module.
        strict: raise, and change nothing, when something that is surely a form cannot be replaced, or nothing can.
        loss_options: how, not what, the fused loss computes: values for some of "memory", "max_logits_bytes" and
            "skip_ignored", as in `linear_cross_entropy`. None keeps what an earlier call has set, a mapping replaces
            all of it, `{}` by the defaults. "skip_ignored" is left off while a compiler or a CUDA graph records.
        mlp: what a gated MLP fused by "rms_norm_mlp", which this asks for, keeps for backward: "saved", gate and up;
            "recompute", neither, for two products more; "tiled", neither, and no more than 4096 rows of them exist at
            once, for very long sequences. None keeps what an earlier call has set, at first "saved". While a model runs
            compiled, or an MLP steps aside for hooks, adapters or sharding, what is native is kept.

    Returns:
        A `Report`; `print(report)` shows what was replaced, what was kept, and why.

    Raises:
        ValueError: `model` is no module, a name in `only`, `skip` or `fuse` fits nothing, `strict` found something
            kept or nothing at all, `loss_options` has something else or finds no loss that is fused, or `mlp` is
            something else or finds no MLP that is fused.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"patch: model: expected a torch.nn.Module, got {type(model).__name__}")
    options = _head.checked_loss_options("patch", loss_options)
    fuse = _with_mlp(_fusions(fuse), _norm_mlp.checked_mlp("patch", mlp))
    modules = list(model.named_modules())
    choice = _Choice(only, skip, fuse, [name for name, _ in modules])
    findings = [_with_mode(finding, model, mlp) for finding in _findings(modules, choice)]
    report = Report(type(model).__name__, grouped(finding[:6] for finding in findings))
    if strict and not report.replaced:
        raise ValueError(f"patch: strict: expected something to replace, got\n{report}")
    if strict and report.kept:
        raise ValueError(f"patch: strict: expected every form to be replaced, got\n{report}")
    heads = [] if options is None else _heads_for(options, findings, modules, report)
    layers = [f.name for f in findings if f.form == _norm_mlp.NAME and f.verdict == "replaced"]
    if mlp is not None and not layers:
        raise ValueError(f"patch: mlp: expected a model with a norm and an MLP that are fused, got\n{report}")
    before = [(module, _swap.put_on(module)) for _, module in modules]
    try:
        for finding in findings:
            if finding.act is not None:
                finding.act()
        for head in heads:
            _head.set_loss_options(head, options or {})
        for name in layers if mlp is not None else ():
            _norm_mlp.set_mlp(model.get_submodule(name), mlp)
        _link(modules)
    except BaseException:
        # What an earlier call has replaced stays so.
        for module, state in before:
            _swap.put_back(module, state)
        raise
    if not report.replaced:
        # From the caller's line, past the lock.
        warnings.warn(f"tigon.patch replaced nothing.\n{report}", stacklevel=3)
    if any(os.environ.get(name, "0") not in ("", "0") for name in ("TIGON_DEBUG", "LIGER_KERNEL_DEBUG")):
        # A warning is shown on stderr even where logging is not configured.
        logger.warning("tigon.patch: %s", report)
    return report


def _heads_for(
    options: dict[str, Any], findings: list[_Finding], modules: list[tuple[str, nn.Module]], report: Report
) -> list[nn.Module]:
    """The output layers whose losses are to compute with these options, at least one."""
    by_name, heads = dict(modules), []
    for finding in findings:
        if finding.form != LOSS or finding.verdict != "replaced":
            continue
        head = _hf.output_layer(by_name[finding.name])
        # One that was adapted or exchanged after patching gives real logits.
        if head is not None and (finding.act is not None or (_head.is_linear(head) and _swap.is_installed(head))):
            _head.require_a_row("patch", head, options)
            heads.append(head)
    if not heads:
        changed = "one whose output layer was adapted or exchanged after patching: unpatch it first"
        got = changed if report.loss == "fused" else f"\n{report}"
        raise ValueError(f"patch: loss_options: expected a model whose loss is fused, got {got}")
    return heads


# What else to undo on every module: put here by who puts more on a model than a swap.
also_undo: list[Callable[[nn.Module], None]] = []


@_one_at_a_time
def unpatch(model: nn.Module) -> None:
    """Undo `patch`: every module gets back exactly the forward it had.

    Raises:
        ValueError: `model` is no module.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"unpatch: model: expected a torch.nn.Module, got {type(model).__name__}")
    stuck = [name for name, module in model.named_modules() if not _undo(module)]
    for undo in also_undo:
        for module in model.modules():
            undo(module)
    if stuck:
        warnings.warn(
            f"tigon.unpatch: the forward of {', '.join(stuck)} was wrapped after patching and stays patched;"
            " take the wrapper off first",
            stacklevel=3,
        )


def _undo(module: nn.Module) -> bool:
    mark = module.__dict__.get("_tigon")
    if mark is None:
        return True
    if not _swap.uninstall(module):
        return False
    if isinstance(mark.settings, _head.ModelSettings) and mark.settings.own_loss:
        if module.__dict__.get("_loss_function") is _head.causal_lm_loss:
            del module.__dict__["_loss_function"]
            if mark.settings.loss_before:
                module.__dict__["_loss_function"] = mark.settings.loss_before[0]
        head = _hf.output_layer(module)
        if head is not None and "_tigon" in head.__dict__:
            return _swap.uninstall(head)
    return True


def _language_models(modules: list[tuple[str, nn.Module]]) -> list[str]:
    """Names of those whose loss is patched."""
    marks = ((name, module.__dict__.get("_tigon")) for name, module in modules if _swap.is_installed(module))
    return [name for name, mark in marks if isinstance(mark.settings, _head.ModelSettings) and mark.settings.own_loss]


def _link(modules: list[tuple[str, nn.Module]]) -> None:
    """Tell every model which patched language models it holds; some get a forward for this alone."""
    patched = _language_models(modules)
    for name, module in modules:
        if not _hf.is_pretrained_model(module):
            continue
        inner = _within(name, patched)
        mark = module.__dict__.get("_tigon") if _swap.is_installed(module) else None
        if mark is not None and isinstance(mark.settings, _head.ModelSettings):
            module.__dict__["_tigon"] = mark._replace(settings=mark.settings._replace(inner=inner))
        elif inner and mark is None and not _swap.foreign_forward(module):
            index = None if _hf.computes_a_loss(type(module).forward) else _head.labels_index(module)
            settings = _head.ModelSettings(index, (), own_loss=False, inner=inner)
            function = _swap.like(_head.model_forward, type(module).forward)
            _swap.install(module, LOSS, "", settings, function)


# ---- deciding ----


def _findings(modules: list[tuple[str, nn.Module]], choice: _Choice) -> list[_Finding]:
    memo: dict[int, str] = {}
    findings = []
    for name, module in modules:
        installed = _installed(name, module, choice)
        findings += installed
        found = installed[0] if installed else _form(name, module, choice, memo)
        if found and not installed:
            findings.append(found)
        # What only looks like a form may still hold a rotary function or a loss.
        if not found or found.verdict == "kept":
            found = _rotary(name, module, choice) or _loss(name, module, choice, modules)
            if found:
                findings.append(found)
    findings += _fused_across(modules, choice, findings)
    fused = [finding.name for finding in findings if finding.form == LOSS and finding.verdict == "replaced"]
    by_name = dict(modules)
    return [finding for finding in findings if not _hands_labels_on(finding, by_name[finding.name], fused)]


def _hands_labels_on(finding: _Finding, module: nn.Module, fused: list[str]) -> bool:
    """Whether a model has no loss to replace but that of a language model within it, which is replaced."""
    if finding.form != LOSS or finding.verdict != "kept":
        return False
    return bool(_within(finding.name, fused)) and not _hf.computes_a_loss(type(module).forward)


def _within(name: str, names: list[str]) -> tuple[str, ...]:
    """Those of `names` that are below `name`, as seen from there."""
    prefix = f"{name}." if name else ""
    return tuple(each.removeprefix(prefix) for each in names if each != name and each.startswith(prefix))


def _installed(name: str, module: nn.Module, choice: _Choice) -> list[_Finding]:
    mark = module.__dict__.get("_tigon")
    # The output layer has no row of its own.
    if not _swap.is_installed(module) or not mark.variant:
        return []
    rows = [(mark.form, mark.variant)]
    if isinstance(mark.settings, _qk_norm_rope.QkNormSettings):
        rows.append((_qk_norm_rope.NAME, ", ".join(mark.settings.norms)))
    cls, why = type(module).__name__, ""
    if isinstance(mark.settings, _glu_linear.GluLinearSettings):
        parts = _glu_linear.parts_of(module, mark.settings.mlp)
        # Adapters and hooks that came since: its calls go through the projection.
        why = parts.why
        rows += [] if why else [(_glu_linear.NAME, parts.mlp.down)]
    off = [_Finding(name, cls, _glu_linear.NAME, "", "kept", why)] if why else []
    if isinstance(mark.settings, _norm_mlp.NormMlpSettings) and (why := _norm_mlp.why_not(module, mark.settings)):
        rows, off = [], [_Finding(name, cls, _norm_mlp.NAME, "", "kept", why)]
    if isinstance(mark.settings, _lora.LoraSettings) and (why := _lora.parts_of(module).why):
        rows, off = [], [_Finding(name, cls, _lora.NAME, "", "kept", why)]
    findings = [*(_Finding(name, cls, *row, "replaced", "already patched") for row in rows), *off]
    return [finding for finding in findings if choice.allows(finding.form, name)]


# Verdicts of this process, by what they depend on; a reason is a verdict too.
_verdicts: dict[Any, Found | str] = {}


def _verdict(
    form: str,
    module: nn.Module,
    memo: dict[int, str],
    verify: Callable[..., Found],
    *more: Any,
    opaque: Container[str] = (),
) -> Found | str:
    """What `verify(module, *more, generator)` says, or why it refuses; `more` is part of what it depends on, what is in
    `opaque` attributes and children is not."""
    key = _probe.fingerprint(module, memo, opaque)
    if key is not None:
        key = (form, key, repr(more))
        if key in _verdicts:
            return _verdicts[key]
    try:
        with _probe.laboratory() as generator:
            verdict: Found | str = verify(module, *more, generator)
    except Refused as refused:
        verdict = str(refused)
    except Exception as error:
        verdict = f"the probe failed: {type(error).__name__}: {error}"
    if key is not None:
        _verdicts[key] = verdict
    return verdict


def _form(name: str, module: nn.Module, choice: _Choice, memo: dict[int, str]) -> _Finding | None:
    cls, kept = type(module).__name__, None
    for form in FORMS:
        match = form.match(module)
        if match == "no" or not choice.allows(form.name, name):
            continue
        if _swap.foreign_forward(module):
            verdict: Found | str = "its forward was replaced on the instance already"
        else:
            verdict = _verdict(form.name, module, memo, form.verify)
        if isinstance(verdict, Found):
            function = _swap.like(form.forward, type(module).forward, argument_of(module))
            act = _install(module, form.name, verdict, function)
            return _Finding(name, cls, form.name, verdict.variant, "replaced", "", act, verdict)
        if match == "sure" and kept is None:
            kept = _Finding(name, cls, form.name, "", "kept", verdict)
    return kept


def _install(module: nn.Module, form: str, found: Found, function: Callable[..., Any]) -> Callable[[], None]:
    return lambda: _swap.install(module, form, found.variant, found.settings, function)


def _fused_across(modules: list[tuple[str, nn.Module]], choice: _Choice, findings: list[_Finding]) -> list[_Finding]:
    """What is asked to be computed together across modules that are replaced."""
    by_name, replaced = dict(modules), [finding for finding in findings if finding.verdict == "replaced"]
    norms: dict[str, dict[str, Found]] = {}
    mlps: dict[str, dict[str, Found]] = {}

    def found_of(finding: _Finding) -> Found:
        module = by_name[finding.name]
        mark = module.__dict__.get("_tigon")
        if finding.form == "glu" and mark is not None:
            return finding.found or Found(mark.variant, _glu_linear.gate_of(module))
        return finding.found or Found(mark.variant, mark.settings)

    for finding in replaced:
        if choice.fuse and finding.form in ("rms_norm", "glu"):
            parent, _, child = finding.name.rpartition(".")
            (norms if finding.form == "rms_norm" else mlps).setdefault(parent, {})[child] = found_of(finding)
    forms = {finding.name: finding.form for finding in replaced}
    memo: dict[int, str] = {}
    fused = []
    done = {finding.name for finding in findings if finding.form == _glu_linear.NAME}
    paired = {finding.name for finding in findings if finding.form == _norm_mlp.NAME}
    for finding in replaced if _glu_linear.NAME in choice.fuse else ():
        if finding.form == "glu" and finding.name not in done:
            module = by_name[finding.name]
            parts = _glu_linear.parts_of(module, found_of(finding).settings)
            made = _fused(_glu_linear.NAME, _glu_linear, finding.name, module, parts, choice, memo)
            fused += [made] if made else []
    adapted = {finding.name for finding in findings if finding.form == _lora.NAME}
    for name, module in modules if _lora.NAME in choice.fuse else ():
        if name not in adapted and _lora.match(module) != "no":
            made = _fused(_lora.NAME, _lora, name, module, _lora.parts_of(module), choice, memo)
            fused += [made] if made else []
    for name, found in norms.items():
        module, form, finding = by_name[name], forms.get(name), None
        if form in (None, _add_norm.NAME) and _norm_mlp.NAME in choice.fuse and name not in paired:
            parts = _norm_mlp.parts_of(module, found, mlps.get(name, {}))
            finding = _fused(_norm_mlp.NAME, _norm_mlp, name, module, parts, choice, memo)
            if finding and form is not None:
                why = f"its {form} is computed together since an earlier call"
                finding = finding._replace(variant="", verdict="kept", reason=why, act=None)
            fused += [finding] if finding else []
        if name in paired or (finding and finding.verdict == "replaced"):
            # A layer takes one of both.
            continue
        if form is None and _add_norm.NAME in choice.fuse:
            finding = _fused(_add_norm.NAME, _add_norm, name, module, found, choice, memo)
        elif form == "rope" and _qk_norm_rope.NAME in choice.fuse:
            finding = _fused(_qk_norm_rope.NAME, _qk_norm_rope, name, module, found, choice, memo)
        else:
            continue
        fused += [finding] if finding else []
    return fused


def _fused(
    form: str, kind: Any, name: str, module: nn.Module, parts: Any, choice: _Choice, memo: dict[int, str]
) -> _Finding | None:
    """`parts` are what of the module is replaced, as the fusion needs it."""
    match, cls = kind.match(module, parts), type(module).__name__
    if match == "no" or not choice.allows(form, name):
        return None
    if _swap.foreign_forward(module):
        verdict: Found | str = "its forward was replaced on the instance already"
    else:
        verdict = _verdict(form, module, memo, kind.verify, parts, opaque=(*kind.opaque(module, parts), _hf.PLACE))
    if not isinstance(verdict, Found):
        return _Finding(name, cls, form, "", "kept", verdict) if match == "sure" else None

    def act() -> None:
        kept_as = form, verdict.variant
        if _swap.is_installed(module):
            # Its rotation or its gate was replaced before; the new forward does that too.
            mark = module.__dict__["_tigon"]
            kept_as = mark.form, mark.variant
            _swap.uninstall(module)
        _swap.install(module, *kept_as, verdict.settings, kind.replacement(module))

    return _Finding(name, cls, form, verdict.variant, "replaced", "", act)


def _rotary(name: str, module: nn.Module, choice: _Choice) -> _Finding | None:
    forward = type(module).forward
    functions = _rope.rotary_functions(forward)
    if not functions or not choice.allows("rope", name):
        return None
    cls = type(module).__name__
    try:
        if _swap.foreign_forward(module):
            raise Refused("its forward was replaced on the instance already")
        found = [_rope.verify(function) for function in functions.values()]
        new = _rope.rebound(forward, tuple(functions.items()))
    except Refused as refused:
        return _Finding(name, cls, "rope", "", "kept", str(refused))
    variant = "; ".join(dict.fromkeys(each.variant for each in found))
    act = _install(module, "rope", Found(variant, ()), new)
    return _Finding(name, cls, "rope", variant, "replaced", "", act)


def _loss(name: str, module: nn.Module, choice: _Choice, modules: list[tuple[str, nn.Module]]) -> _Finding | None:
    if not _hf.is_pretrained_model(module):
        return None
    index, head = _head.labels_index(module), _hf.output_layer(module)
    if index is None or head is None:
        return None
    if not choice.allows(LOSS, name, *(fqn for fqn, each in modules if each is head)):
        return None
    cls = type(module).__name__
    reason = _why_no_loss(module, head)
    if reason:
        return _Finding(name, cls, LOSS, "", "kept", reason)
    shifts = _hf.calls_loss_function(type(module).forward)
    settings = _head.ModelSettings(index, _loss_before(module), shifts=shifts)

    def act() -> None:
        function = _swap.like(_head.model_forward, type(module).forward)
        if _swap.is_installed(module):
            # Until now it only held another.
            _swap.uninstall(module)
        _swap.install(module, LOSS, "deferred logits", settings, function)
        if not _swap.is_installed(head):
            function = _swap.like(_head.head_forward, type(head).forward)
            _swap.install(head, LOSS, "", _head.HeadSettings(_head.loss_options_of(head)), function)
        if shifts:
            module.__dict__["_loss_function"] = _head.causal_lm_loss

    return _Finding(name, cls, LOSS, "deferred logits", "replaced", "", act)


def _loss_before(model: nn.Module) -> tuple[Any, ...]:
    """The loss function the instance has of its own, `()` for none."""
    state = model.__dict__
    if state.get("_loss_function") is _head.causal_lm_loss:
        # A pickle of a patched model: the forwards are native again, the loss is not.
        return state["_tigon"].settings.loss_before if "_tigon" in state else ()
    return (state["_loss_function"],) if "_loss_function" in state else ()


def _why_no_loss(model: nn.Module, head: nn.Module) -> str:
    forward = type(model).forward
    if _hf.calls_loss_function(forward):
        loss = getattr(model, "loss_function", None)
        if loss not in (_hf.native_loss(), _head.causal_lm_loss):
            return f"its loss function is {getattr(loss, '__name__', repr(loss))}, not the causal language model loss"
    elif not _hf.calls_cross_entropy(forward):
        return "its forward calls neither loss_function nor a cross entropy"
    if reason := _dispatch.why_unseen(model):
        return reason
    if not _head.is_linear(head):
        return f"its output layer is a {type(head).__name__}, not a plain nn.Linear"
    if _hf.is_tensor_parallel(model):
        return "its output layer is split over tensor-parallel ranks"
    for module in (model, head):
        if _swap.foreign_forward(module):
            return f"the forward of its {type(module).__name__} was replaced on the instance already"
    return ""
