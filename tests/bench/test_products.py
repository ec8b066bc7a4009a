"""The floor of an operator with matrix products: those products, for each of its inputs that gets a gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tigon.bench.run import Contestant, _products
from tigon.specs import OpSpec, all_specs
from tigon.testing.check import Checker

SPECS = [spec for spec in all_specs().values() if spec.cost(spec.cases[0], 4).forward_flops]
# Those that need other processes.
NOT_MEASURED = ("vocab_parallel_linear_cross_entropy",)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_products_run_in_every_mode(spec: OpSpec) -> None:
    measured = [case for case in spec.cases if case.models_only]
    assert measured or spec.name in NOT_MEASURED
    for large in measured:
        case = replace(large, sizes={name: min(size, 16) for name, size in large.sizes.items()}, models_only=False)
        checker = Checker(spec, case, "cpu", torch.float32)
        products = Contestant(_products(next(iter(checker.upstream.values())).shape), checker)
        for mode in ("forward", "backward", "both"):
            made = products.prepare(mode)()
        assert [g.shape for g in made] == [checker.inputs[name].shape for name in checker.wanted]  # type: ignore[union-attr]
