"""Causes of an unresolved condition number, each with a remedy."""

from __future__ import annotations

from typing import NamedTuple


class Cause(NamedTuple):
    """Reason why κ is unresolved, and advice on what to do about it; false if there is none."""

    reason: str = ""
    advice: str = ""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def joined(self, other: Cause) -> Cause:
        """Join both causes, with the advice of the other, which is nearer to the root."""
        known = other.reason in self.reason
        return self if known else Cause(f"{self.reason}, and {other.reason}", other.advice)


NOTHING = Cause()
STANDARDIZE = "standardize the inputs (the columns of a factor), so that the eigenvalues spread over fewer decades"
SMALLER = f"{STANDARDIZE}, or measure fewer parameters together (level='unit')"
ZERO = Cause("the matrix is zero")
#: Causes from the decision of a rank.
NONE_TOLD = Cause("no eigenvalue exceeds the bound of its error", STANDARDIZE)
BELOW_BOUND = Cause("small eigenvalues lie above rounding and below the bound of their error", STANDARDIZE)
TIED = Cause("no gap separates small eigenvalues from those of the size of rounding", STANDARDIZE)
SCALES = Cause("eigenvalues of the size of rounding belong to rows or columns of a small scale", STANDARDIZE)
TOO_LARGE = Cause(
    "neither the sizes of the values nor an exact rank, too expensive at this order, tell which are zero",
    "give the error of the entries (error=), or a bound of the rank (rank_bound=)",
)
#: Causes from the numbers that the Hessian is computed from.
SUMMED = Cause("small eigenvalues are below the rounding of the sums that form the Hessian", SMALLER)
ALL_ROUNDING = Cause(
    "the Hessian is no larger than the rounding of the terms that it is the difference of",
    "measure other layers (layers=) or another level (level=), or write the loss without differences of large terms",
)
UNDERFLOW = Cause(
    "numbers underflow in float64 where features meet the curvature of the loss: what looks like zero may not be",
    "standardize the inputs and targets, or scale the loss or the logits, so that no number is so small",
)
REPEATED = Cause(
    "an operation rounds different features to equal values, which may be independent of one another",
    "standardize the inputs or shrink the weights, so that activations keep digits that tell features apart",
)
BY_DIFFERENCES = Cause(
    "the Hessian is known by differences of gradients, whose error may hide its smallest eigenvalues",
    "let torch differentiate twice what it cannot, or measure fewer parameters together (level='unit')",
)
DIFFERENCES = Cause(
    "some second derivatives are differences of larger terms, of which little more than rounding is left",
    "write the loss without them, as with softplus, logsumexp or log1p, or standardize the inputs",
)


def saturated(where: str) -> Cause:
    """Cause for activations without digits left, in words such as ``"Tanh at 40 of 64 values, 5 of 8 units"``."""
    return Cause(
        f"activations are saturated ({where}), so that their derivatives have lost digits",
        "standardize the inputs or shrink the weights, so that fewer activations saturate",
    )


def imprecise(precision: str) -> Cause:
    """Cause for a forward pass in less precision than float64, which ``precision`` describes in words."""
    return Cause(
        f"the forward pass rounds to fewer digits than float64 ({precision}), which may hide the smallest eigenvalues",
        "probe in float64 (dtype=torch.float64), without casts in the model",
    )


def unconverged(message: str, order: int, memory: int) -> Cause:
    """Cause for an iteration that did not converge; ``memory``: bytes with which the matrix is formed instead, or 0."""
    dense = f"raise memory to {memory / 1e9:.3g} GB, for the matrix itself, " if memory else ""
    return Cause(
        f"the iteration for the smallest nonzero eigenvalue of {order:,} parameters ended without it: {message}",
        f"raise rtol, {dense}or measure the layers one by one (level='layer')",
    )


def few_products(products: int, order: int) -> Cause:
    """Cause for a number of products that only bounds κ from below."""
    return Cause(
        f"{products:,} products bound κ of {order:,} parameters from below only",
        f"make more products at level='network' (products={order} form the matrix), or leave products= out there, "
        "which iterates for both ends",
    )
