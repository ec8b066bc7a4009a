"""The names of Liger-Kernel 0.8.5, computed by tigon: tables and argument orders, no mathematics.

What tigon has no operator for raises ImportError by name; see `_missing.py` and docs/liger.md.
"""

from ._missing import missing_from, refuse_module

# Above every version that is asked for: transformers wants 0.3.0, others 0.8.2.
__version__ = "0.9.0"
__all__ = ["__version__", "refuse_module"]

__getattr__ = missing_from(__name__)
