"""Versions: the package's own, which is read without importing anything, and torch's."""

__version__ = "0.1.0"


def torch_version() -> tuple[int, int]:
    """The first two numbers of torch's version."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)
