"""The oracle that ships: error budgets, poisoned allocations, and the checks that `tigon check` runs."""

from .budget import Measured, assert_within_budget, measure
from .check import STAGES, CheckResult, cases_for, check_case, check_op
from .poison import poison

__all__ = [
    "STAGES",
    "CheckResult",
    "Measured",
    "assert_within_budget",
    "cases_for",
    "check_case",
    "check_op",
    "measure",
    "poison",
]
