"""The law of the house, checked on the source text. Each rule has an example that it must catch."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tigon.ops import OPS
from tigon.specs import all_specs

SOURCE = Path(__file__).resolve().parents[1] / "src" / "tigon"

# Arrows point from a higher rank to a lower one; see DESIGN.md. A new part of the package is given its rank here.
RANK = {
    "_ops": 0,
    "_progress": 0,
    "_warmup": 2,
    "ops": 1,
    "losses": 2,
    "layers": 2,
    "specs": 3,
    "testing": 4,
    "patch": 4,
    "hub": 5,
    "bench": 5,
    "demo": 5,
    "as_liger": 5,
    "__init__": 6,
    "cli": 7,
    "__main__": 8,
}
PORTABLE = {"ops", "losses", "layers"}
SECTIONS = ["reference", "kernels", "operators", "autograd", "public"]
MAX_LINES = 800
MODEL_NAMES = re.compile(
    r"model_type|llama|mistral|mixtral|qwen|gemma|deepseek|olmo|granite|cohere|starcoder|gpt_?neo|falcon"
    r"|bloom|\bglm\d|\bphi[-_]?[34]",
    re.IGNORECASE,
)


def part_of(path: str) -> str:
    """The part of the package that a file belongs to: `ops/glu.py` to ops, `cli.py` to cli."""
    return Path(path).parts[0].removesuffix(".py")


def imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything a file imports; names inside tigon begin with `tigon.`."""
    package = ["tigon", *Path(path).parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def arrows(path: str, source: str) -> Iterator[str]:
    own = part_of(path)
    if own not in RANK:
        yield f"{path}: {own} has no rank; give it one in tests/test_architecture.py"
        return
    for line, name in imported(path, source):
        words = name.split(".")
        if words[0] != "tigon":
            continue
        target = words[1] if len(words) > 1 and words[1] in RANK else "__init__"
        if name == "tigon.__version__" and RANK[own] >= RANK["testing"]:
            continue
        if target != own and RANK[target] >= RANK[own]:
            yield f"{path}:{line}: {own} must not import {name}"


def portability(path: str, source: str) -> Iterator[str]:
    if part_of(path) not in PORTABLE:
        return
    if source.strip() and "from __future__ import annotations" not in source and not path.endswith("__init__.py"):
        yield f"{path}:1: needs `from __future__ import annotations`"
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            if top == "triton" and path not in ("ops/_triton.py", "ops/_gluon.py"):
                yield f"{path}:{node.lineno}: takes triton from ._triton or ._gluon"
            elif top not in sys.stdlib_module_names and top not in ("torch", "triton"):
                yield f"{path}:{node.lineno}: portable code must not import {name}"


def model_names(path: str, source: str) -> Iterator[str]:
    # The demo trains one, the benchmark names the shapes of real ones, and as_liger answers to an interface whose names
    # are names of models; what is patched is found by structure there too.
    if part_of(path) in ("demo", "bench", "as_liger"):
        return
    for number, line in enumerate(source.splitlines(), 1):
        for found in MODEL_NAMES.finditer(line):
            yield f"{path}:{number}: model name {found.group()!r}"


def section_order(path: str, source: str) -> Iterator[str]:
    if part_of(path) != "ops" or Path(path).name.startswith("_"):
        return
    found = re.findall(r"^# ---- (.+) ----$", source, re.MULTILINE)
    if found != SECTIONS:
        yield f"{path}: sections {found}, expected {SECTIONS}"
    if not ast.get_docstring(ast.parse(source)):
        yield f"{path}: needs a docstring with the formula"


def length(path: str, source: str) -> Iterator[str]:
    lines = source.count("\n")
    if lines > MAX_LINES:
        yield f"{path}: {lines} lines, at most {MAX_LINES}"


def launches(path: str, source: str) -> Iterator[str]:
    if part_of(path) not in PORTABLE or path == "ops/_launch.py":
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            yield f"{path}:{node.lineno}: launch kernels through launch()"


def device_literals(path: str, source: str) -> Iterator[str]:
    if part_of(path) in ("bench", "demo"):
        return
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        given = [k.value for k in node.keywords if k.arg == "device"]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            given += node.args[:1]
        if any(isinstance(v, ast.Constant) and str(v.value).startswith("cuda") for v in given):
            yield f"{path}:{node.lineno}: device literal"
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield f"{path}:{node.lineno}: .cuda()"


def atomics(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("atomic_"):
            yield f"{path}:{node.lineno}: {node.attr} makes the result depend on the order of programs"


RULES = {
    arrows: ("ops/bad.py", "from ..specs import all_specs\n"),
    portability: ("losses/bad.py", "from __future__ import annotations\nimport transformers\n"),
    model_names: ("patch/bad.py", "if model.config.model_type == 'x':\n    pass\n"),
    section_order: ("ops/bad.py", '"""y = x."""\n# ---- kernels ----\n# ---- reference ----\n'),
    length: ("patch/bad.py", "x = 1\n" * (MAX_LINES + 1)),
    launches: ("ops/bad.py", "_scale_kernel[(1,)](x)\n"),
    device_literals: ("testing/bad.py", "x = torch.ones(2, device='cuda')\n"),
    atomics: ("ops/bad.py", "tl.atomic_add(x_ptr, x)\n"),
}
MORE_EXAMPLES = [
    (arrows, "patch/bad.py", "import tigon\n"),
    (arrows, "specs/bad.py", "def f():\n    from ..testing import check_op\n"),
    (arrows, "losses/bad.py", "from ..layers import RMSNorm\n"),
    (arrows, "new_part/bad.py", "x = 1\n"),
    (portability, "ops/bad.py", "from __future__ import annotations\nimport triton.language as tl\n"),
    (portability, "ops/bad.py", "import torch\n"),
    (model_names, "layers.py", '"""The norm of Gemma."""\n'),
    (device_literals, "ops/bad.py", "x = x.cuda()\n"),
    (device_literals, "ops/bad.py", "x = x.to('cuda:0')\n"),
]
ALLOWED = [
    (arrows, "specs/good.py", "from ..ops.glu import glu\nfrom ._spec import Case\n"),
    (arrows, "bench/good.py", "from .. import __version__\nfrom ..testing import measure\n"),
    (portability, "ops/good.py", "from __future__ import annotations\nimport math\nimport torch\nfrom . import x\n"),
    (launches, "ops/good.py", "launch(_scale_kernel, (1,), x)\n"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_the_rule(rule) -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 15
    found = [
        violation
        for file in files
        for violation in rule(file.relative_to(SOURCE).as_posix(), file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [(rule, *example) for rule, example in RULES.items()] + MORE_EXAMPLES,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_rule_bites(rule, path: str, source: str) -> None:
    assert list(rule(path, source))


@pytest.mark.parametrize(("rule", "path", "source"), ALLOWED, ids=lambda value: getattr(value, "__name__", None))
def test_rule_lets_pass(rule, path: str, source: str) -> None:
    assert not list(rule(path, source))


def missing_parts(docstring: str | None) -> list[str]:
    """Parts of a public docstring that are not there, in order; a variant may point at its operator instead."""
    elsewhere = re.search(
        r"Numerics, memory, difference from the reference and source are those of `(\w+)`", docstring or ""
    )
    if elsewhere and elsewhere[1] in OPS:
        return []
    wanted = ["Numerics:", "Memory:", "Differs from the reference:", "Source:"]
    at = [re.search(rf"^ *{re.escape(part)}", docstring or "", re.MULTILINE) for part in wanted]
    absent = [part for part, found in zip(wanted, at, strict=True) if found is None]
    places = [found.start() for found in at if found]
    return absent or ([] if places == sorted(places) else ["the order Numerics, Memory, Differs, Source"])


def test_every_operator_has_a_specification_and_a_page() -> None:
    assert set(all_specs()) == set(OPS)
    for name, record in OPS.items():
        assert not missing_parts(record.public.__doc__), f"{name}: {missing_parts(record.public.__doc__)}"
        assert record.reference.__name__ == f"{name}_reference"


def test_missing_docstring_parts_are_seen() -> None:
    assert missing_parts("Numerics: a\nMemory: b\nSource: c") == ["Differs from the reference:"]
    assert missing_parts("Memory: b\nNumerics: a\nDiffers from the reference: d\nSource: c")
    assert missing_parts(None)
    assert missing_parts("Numerics, memory, difference from the reference and source are those of `nowhere`.")


def test_reference_has_the_signature_of_the_operator() -> None:
    import inspect

    for name, record in OPS.items():
        ours, reference = (inspect.signature(f).parameters for f in (record.public, record.reference))
        assert list(ours) == list(reference), name
        for key in ours:
            assert ours[key].default == reference[key].default, f"{name}: default of {key}"
            assert ours[key].kind == reference[key].kind, f"{name}: kind of {key}"
