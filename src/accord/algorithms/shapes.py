"""What every formula checks first."""

from __future__ import annotations

from torch import Tensor


def same_shape(**tensors: Tensor | None) -> None:
    """Broadcasting hides mistakes (a [N] weight against a [N, 1] value): items must match one to one."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError("shapes differ: " + ", ".join(f"{name} {shape}" for name, shape in shapes.items()))
