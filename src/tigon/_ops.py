"""Namespace of the registered operators; a build for another namespace replaces this file alone."""


def add_op_namespace_prefix(name: str) -> str:
    return f"tigon::{name}"
