"""Nothing of this module has a counterpart: kernels here are launched by the operators alone."""

from .._missing import missing_from

__getattr__ = missing_from(__name__)
