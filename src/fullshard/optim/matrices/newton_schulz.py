"""The nearest matrix with orthonormal rows or columns, by Newton and Schulz's iteration.

The polar factor of ``X = U S V^T`` is ``U V^T``: all singular values become 1. An odd polynomial

    p(x) = a x + b x^3 + c x^5

that is applied to ``X`` is applied to its singular values. Repeated, it moves all of them from (0, 1] towards 1, with
matrix products alone. The usual coefficients grow small values fast and end between about 0.7 and 1.2, which is near enough
for an optimizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(
    matrices: Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Return the polar factors of a stack of matrices (number, rows, columns), in their dtype.

    A matrix of zeros stays one. A matrix with NaN or infinity becomes NaN; others of the stack do not.
    """
    a, b, c = coefficients
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices  # smaller products
    # Singular values are at most the Frobenius norm. It is summed in fp32: bf16 has too few digits for many elements.
    norms = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    found: Tensor = wide / norms.clamp(min=eps).to(wide.dtype)
    for _ in range(steps):
        gram = torch.bmm(found, found.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, polynomial, found, beta=a)
    return found.mT if wide is not matrices else found
