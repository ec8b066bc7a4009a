"""Benchmarks against peers, with the measured roof beside every number. Needs a CUDA device."""
