"""The layers of the installed package, in a folder of the form that `kernels` loads."""

from tigon import layers

__all__ = ["layers"]
