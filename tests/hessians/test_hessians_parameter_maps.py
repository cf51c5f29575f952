"""P of factors that mix parameters: their rounding is not taken for curvature."""

import pytest
import torch
from torch import nn

import hesscond
from hesscond.hessians import Kronecker, ParameterMap, layer_map
from hesscond.hessians.coordinates import DensePreconditioner


def rotation(n: int, generator: torch.Generator) -> torch.Tensor:
    """(n, n) orthogonal."""
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


@pytest.mark.parametrize("kind", ["map", "Kronecker"])
def test_what_is_zero_in_the_plain_coordinates_stays_so_in_mixed_ones(kind: str) -> None:
    """Dead features leave H singular: κ is that of the eigenvalues that are left, which numpy knows as well."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(9, 4).double()
    x = torch.randn(40, 9, generator=generator, dtype=torch.float64).relu()
    x[:, [2, 5]] = 0.0
    targets = torch.randint(4, (40,), generator=generator)
    v = 10.0 ** (2 * torch.rand(4, 9, generator=generator, dtype=torch.float64))
    L, R = rotation(4, generator), rotation(9, generator)
    weight, bias = ParameterMap(v, (L, R)), ParameterMap(torch.ones(4, dtype=torch.float64))
    P = layer_map(layer, weight, bias, "rotated")
    if kind == "Kronecker":
        P = Kronecker(L, DensePreconditioner(torch.block_diag(torch.ones(1, 1, dtype=torch.float64), R)))
    model, batch, loss = nn.Sequential(layer), (x, targets), nn.CrossEntropyLoss()
    plain = hesscond.probe(model, loss, batch, level="layer")["0"].kappa
    own = hesscond.probe(model, loss, batch, level="layer", method=P)["0"]
    # three of four units, since softmax knows no common shift, and eight of ten features with the bias
    assert plain.rank == own.kappa.rank == 3 * 8
    assert own.kappa.resolved
    values = torch.linalg.eigvalsh(own.hessian()).abs().sort(descending=True).values
    assert own.kappa.value == pytest.approx(float(values[0] / values[23]), rel=1e-6)
    assert float(values[24]) < 1e-9 * float(values[0])
