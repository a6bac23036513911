"""The orthogonalisation in Muon: a quintic Newton-Schulz iteration (Jordan et al. 2024, "Muon"), arranged for few products.

Shape letters: M, N rows and columns of a matrix, M <= N.
"""

from __future__ import annotations

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic, those of Jordan et al."""
_NUM_STEPS = 3
_BLOCK = 192


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, roughly (most singular values in about 0.6..1.2), in float32.

    A step is x <- (a + b g + c g g) x with g = x x^T. The polynomials of all steps are symmetric and commute, so the first two
    are joined before they meet the long side of x, and the second g is made from the first. The last g is made from x again:
    made from the others it would be off by several percent. For the same reason the constant of a polynomial is kept apart from
    its `rest`. All in bfloat16, which the iteration tolerates and which is twice as fast.
    """
    a = _COEFFICIENTS[0]
    x_MN = matrix.bfloat16()
    is_tall = x_MN.shape[0] > x_MN.shape[1]
    if is_tall:
        x_MN = x_MN.T.contiguous()
    x_MN = x_MN / (x_MN.float().norm() + 1e-20)
    gram_MM = _symmetric_product(x_MN, x_MN.T)
    bound = _bound(gram_MM)
    x_MN, gram_MM = x_MN / bound, gram_MM / bound.square()
    first_MM = _rest(gram_MM)
    moved_MM = _symmetric_product(first_MM, gram_MM)
    gram_MM = _symmetric_product(first_MM, moved_MM).add_(moved_MM, alpha=2 * a).add_(gram_MM, alpha=a * a)
    second_MM = _rest(gram_MM)
    both_MM = _symmetric_product(second_MM, first_MM).add_(first_MM, alpha=a).add_(second_MM, alpha=a)
    x_MN = torch.addmm(x_MN, both_MM, x_MN, beta=a * a)
    x_MN = torch.addmm(x_MN, _rest(_symmetric_product(x_MN, x_MN.T)), x_MN, beta=a)
    return (x_MN.T if is_tall else x_MN).float()


def orthogonalise_plainly(matrix: Tensor) -> Tensor:
    """The reference: the iteration as it is written down, in float64. Tests hold `orthogonalise` to it."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x_MN = (matrix.T if is_tall else matrix).double()
    x_MN = x_MN / x_MN.norm()
    x_MN = x_MN / _bound(x_MN @ x_MN.T)
    for _ in range(_NUM_STEPS):
        gram_MM = x_MN @ x_MN.T
        x_MN = a * x_MN + (b * gram_MM + c * gram_MM @ gram_MM) @ x_MN
    return x_MN.T if is_tall else x_MN


def _bound(gram_MM: Tensor) -> Tensor:
    """The root of the Gram matrix's Frobenius norm bounds the largest singular value, several times tighter than the norm of
    the matrix itself: three steps then do the work of five."""
    return gram_MM.float().norm().sqrt() + 1e-20


def _rest(gram_MM: Tensor) -> Tensor:
    """The polynomial of a step less its constant."""
    _, b, c = _COEFFICIENTS
    return _symmetric_product(gram_MM, gram_MM).mul_(c).add_(gram_MM, alpha=b)


def _symmetric_product(left_MN: Tensor, right_NM: Tensor) -> Tensor:
    """left @ right where that is known to be symmetric: what lies below the diagonal blocks is copied from above."""
    size = left_MN.shape[0]
    if size <= _BLOCK:
        return left_MN @ right_NM
    product_MM = left_MN.new_empty(size, size)
    for start in range(0, size, _BLOCK):
        end = min(start + _BLOCK, size)
        rows = left_MN[start:end] @ right_NM[:, start:]
        product_MM[start:end, start:] = rows
        product_MM[end:, start:end] = rows[:, end - start :].T
    return product_MM
