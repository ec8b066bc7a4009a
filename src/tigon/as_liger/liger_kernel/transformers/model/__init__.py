"""Losses and outputs of Liger-Kernel's forwards. There are no such forwards: models keep their own."""
