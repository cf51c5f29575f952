"""Coordinates that a block of the Hessian is measured in: preconditioners ŵ = P z, and charts of manifolds."""
