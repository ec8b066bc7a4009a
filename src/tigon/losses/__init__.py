"""Chunked losses on top of `linear_cross_entropy`: preference, policy and distillation. None is here yet."""
