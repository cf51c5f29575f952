"""BNP: identities between a network, its normalized form and one with the normalization merged into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hesscond import methods
from hesscond.hessians import HessianOperator
from hesscond.theorems import base, networks
from hesscond.theorems.matrices import random_size
from hesscond.theorems.rates import normal

#: Negative entries of S of up to this, of its largest, are round-off; above `GAP` times that they are none.
ROUND_OFF = 1e-13
#: A feature whose standard deviation is less than this share of its mean loses digits by centring, in every layer.
FLAT = 1e-2


def drawn_unit(rng: np.random.Generator, samples: int = 0) -> tuple[networks.Network, int, int]:
    """A random network of two to four layers, one of them, and one of its units."""
    hidden = rng.integers(2, 7, rng.integers(1, 4)).tolist()
    sizes = [random_size(rng), *hidden, int(rng.integers(2, 5))]
    network = networks.random_network(rng, sizes, samples or random_size(rng, 40))
    layer = int(rng.integers(len(network.weights)))
    return network, layer, int(rng.integers(len(network.weights[layer])))


def product(H_hat: Tensor, S: Tensor) -> Tensor:
    """ĤᵀSĤ, S diagonal (N,)."""
    return H_hat.T @ (S[:, None] * H_hat)


@base.register
class BNPProposition2(base.LayerStatement):
    """The Hessian of a unit is a product of its inputs and a diagonal curvature."""

    id = "bnp-proposition-2"
    aliases: ClassVar[Mapping[str, str]] = {"prec-theorem-3": "Hessian, and the examples of regression"}
    title = "the Hessian of a unit is ĤᵀSĤ"
    source = "BNP, Proposition 2; PREC, Theorem 3"
    text = (
        "∇²_ŵ L = ĤᵀSĤ for the parameters ŵ = [b, w] of one unit of a dense layer, with Ĥ = [e, H] and the diagonal S "
        "of second derivatives of the mean loss in its pre-activations. True for every activation (almost everywhere "
        "if it has kinks). PREC's examples: S = I/N in linear regression with the loss Σ(ŷ − y)²/2N, and S = "
        "diag(ŷ(1 − ŷ))/N in logistic regression. What is not said: S ≥ 0. It is so if all that follows is piecewise "
        "linear and the loss convex, with many entries exactly 0; with tanh, GELU or sigmoid hidden units a third to "
        "half of S is negative. One sample has a single row of Ĥ, and so κ = 1: no preconditioner lowers it."
    )
    hypotheses = ("the loss is twice differentiable at the point", "the unit is not dead (S ≠ 0)")
    claims = (
        base.Claim("Hessian", "∇²_ŵ L = ĤᵀSĤ", True),
        base.Claim(
            "S ≥ 0, piecewise linear", "S ≥ 0 if all after the unit is piecewise linear and the loss convex", True
        ),
        base.Claim("linear regression", "∇² Σ(ŷ − y)²/2N = ĤᵀĤ/N", True),
        base.Claim("logistic regression", "∇² of the mean cross-entropy = Ĥᵀ diag(ŷ(1 − ŷ)) Ĥ/N", True),
        base.Claim("one sample", "κ(∇²_ŵ L) = κ(Ĥ)² = 1 for N = 1", True),
    )
    trials = 100
    by_unit = True
    inputs = False
    #: S of a regression, N times, from its outputs ŷ (N,).
    regressions: ClassVar[dict[str, Callable[[Tensor], Tensor]]] = {
        "squared error": torch.ones_like,
        "logistic": lambda y: y * (1 - y),
    }

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """ĤᵀSĤ as the probe has it, against double backward through the network; of the signs it is not known why."""
        others = len(self.claims) - 1
        return [same_unit(layer), *[base.not_applicable("what follows the unit is not looked at")] * others]

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        network, layer, unit = drawn_unit(rng)
        H_hat, S = network.features(layer), network.curvature(layer, unit)
        same = base.equal(
            product(H_hat, S).numpy(),
            network.unit_hessian(layer, unit).numpy(),
            product(H_hat.abs(), S.abs()).max().item(),
        )
        sign = nonnegative(S.numpy())
        regressions = [self.regression(rng, criterion) for criterion in self.regressions]
        if layer < len(network.weights) - 1 and network.activation not in networks.PIECEWISE_LINEAR:
            sign = base.not_applicable(f"{network.activation} after the unit")
        network, layer, unit = drawn_unit(rng, 1)
        kappa = networks.hessian_kappa(network.unit_hessian(layer, unit))
        one = base.decided(kappa.lower, kappa.upper, 1 + ROUND_OFF) if kappa.rank else nonnegative(np.zeros(1))
        return [same, sign, *regressions, one]

    def regression(self, rng: np.random.Generator, criterion: str) -> base.Outcome:
        """One unit without an activation, on random inputs."""
        network = networks.random_network(rng, [random_size(rng), 1], random_size(rng, 40), criterion=criterion)
        H_hat, fitted = network.features(0), networks.LINKS[criterion](network.output())[:, 0]
        S = self.regressions[criterion](fitted) / len(fitted)
        scale = product(H_hat.abs(), S.abs()).max().item()
        return base.equal(product(H_hat, S).numpy(), network.unit_hessian(0, 0).numpy(), scale)


def nonnegative(S: np.ndarray) -> base.Outcome:
    """S ≥ 0, with the share that is not as the reason."""
    size = np.abs(S).max()
    if size == 0:
        return base.not_applicable("the unit is dead: S = 0")
    least = S.min() / size
    if least >= 0:
        return base.Outcome("holds")
    if least > -base.GAP * ROUND_OFF:
        return base.Outcome("unresolved", reason="the negative entries of S may be round-off")
    decile = min(9, int(10 * np.mean(S / size < -ROUND_OFF)))
    return base.Outcome("violated", reason=f"{10 * decile} to {10 * decile + 10} % of S negative")


@base.register
class BNPTheorem3(base.Statement):
    """The Hessian in BNP's coordinates has the normalized inputs in place of the inputs."""

    id = "bnp-theorem-3"
    title = "the preconditioned Hessian of a unit is ĜᵀSĜ"
    source = "BNP, Theorem 3"
    text = (
        "With ŵ = P z, P = U D, U = [[1, −μᵀ], [0, I]], D = diag(1, 1/σ): ∇²_z L = ĜᵀSĜ = Pᵀ ∇²_ŵ L P, Ĝ = ĤP = "
        "[e, (H − eμᵀ)/σ]. True for every activation; S is that of Proposition 2, and so are its signs. So is PREC's "
        "eq. (24): in a network with B₀,₁ before each layer, whose statistics are constants, the Hessian of a unit is "
        "ĜᵀSĜ of its normalized inputs."
    )
    hypotheses = (
        "no feature is constant on the batch",
        "the unit is not dead (S ≠ 0)",
        "B₀,₁ with constant statistics (third claim)",
    )
    claims = (
        base.Claim("normalized inputs", "∇²_z L = ĜᵀSĜ", True),
        base.Claim("congruence", "∇²_z L = Pᵀ ∇²_ŵ L P", True),
        base.Claim("constant statistics", "∇² = ĜᵀSĜ for a unit behind B₀,₁, μ and σ constants", True),
    )
    trials = 100

    def normalized(self, H: Tensor) -> Tensor:
        """Ĝ = [e, (H − eμᵀ)/σ] (N, n + 1)."""
        return torch.cat([torch.ones_like(H[:, :1]), (H - H.mean(0)) / H.std(0, correction=0)], 1)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        network, layer, unit = drawn_unit(rng)
        H_hat, S = network.features(layer), network.curvature(layer, unit)
        H = H_hat[:, 1:]
        redrawn = order_one(rng, network)
        behind = self.behind_statistics(redrawn, layer, unit)
        if (H.min(0).values == H.max(0).values).any():
            return [*[base.not_applicable("a feature is constant")] * 2, behind]
        P = transformation(H.mean(0), H.std(0, correction=0))
        z = torch.linalg.solve_triangular(P, network.weights[layer][unit][:, None], upper=True)[:, 0]
        loss = network.unit_loss(layer, unit)
        in_z = torch.func.hessian(lambda z: loss(P @ z))(z).numpy()
        scale = product(H_hat.abs() @ P.abs(), S.abs()).max().item()
        return [
            base.equal(product(self.normalized(H), S).numpy(), in_z, scale),
            base.equal((P.T @ network.unit_hessian(layer, unit) @ P).numpy(), in_z, scale),
            behind,
        ]

    def behind_statistics(self, network: networks.Network, layer: int, unit: int) -> base.Outcome:
        """The Hessian of a unit of the same network with B₀,₁ before each layer, μ and σ constants, against ĜᵀSĜ."""

        def loss(w_hat: Tensor) -> Tensor:
            return normalized_loss(network, network.changed(layer, unit, w_hat), through=False)[0]

        _, statistics = normalized_loss(network, network.weights, through=False)
        if nearly_constant(statistics):
            return base.not_applicable("a feature is nearly constant")
        # what is merged has the same pre-activations, and so the same S
        same = [merged(weight, *known) for weight, known in zip(network.weights, statistics, strict=True)]
        plain = replace(network, weights=tuple(same))
        H, S = plain.features(layer)[:, 1:], plain.curvature(layer, unit)
        if not S.any():
            return base.not_applicable("the unit is dead: S = 0")
        hessian = torch.func.hessian(loss)(network.weights[layer][unit]).numpy()
        # what is centred is as exact as it was before
        size = max(float(((H.abs() + mu.abs()) / sigma).max()) for mu, sigma in statistics[layer:][:1])
        return base.equal(product(self.normalized(H), S).numpy(), hessian, size**2 * float(S.abs().sum()))


def transformation(mu: Tensor, sigma: Tensor) -> Tensor:
    """P = U D (n + 1, n + 1), upper triangular."""
    P = torch.diag(torch.cat([sigma.new_ones(1), 1 / sigma]))
    P[0, 1:] = -mu / sigma
    return P


@base.register
class BNPProposition9(base.LayerStatement):
    """The Hessian of a channel of a convolution, with a curvature that couples the positions of a sample."""

    id = "bnp-proposition-9"
    title = "the Hessian of an output channel is ĤᵀSĤ, S block diagonal"
    source = "BNP, Proposition 9"
    text = (
        "∇²_ŵ L = ĤᵀSĤ for the parameters of one output channel of a convolution, with one row of Ĥ for each sample "
        "and position. True with a block diagonal S: one rs × rs block of second derivatives for each sample, "
        "because the loss of a sample depends on all positions together. With the diagonal of S only it is wrong, "
        "mostly by more than a tenth of its largest entry."
    )
    hypotheses = ("the loss is twice differentiable at the point", "S has entries off the diagonal (second claim)")
    claims = (
        base.Claim("block diagonal S", "∇²_ŵ L = ĤᵀSĤ with rs × rs blocks", True),
        base.Claim("diagonal S", "∇²_ŵ L = Ĥᵀ diag(S) Ĥ", False, published=False),
    )
    trials = 100
    layers = ("Conv1d", "Conv2d", "Conv3d")
    by_unit = True
    inputs = False

    def observe(self, layer: base.Observation) -> Sequence[base.Outcome]:
        """ĤᵀSĤ as the probe has it, against double backward through the network."""
        return [same_unit(layer), base.not_applicable("the diagonal of S is not kept apart")]

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        layer = networks.random_convolution(rng)
        layer = replace(layer, inputs=networks.bordered(layer.inputs, layer.kernel))
        channel = int(rng.integers(len(layer.weight)))
        H_hat, S = layer.patches(), layer.curvature(channel)
        hessian = layer.unit_hessian(channel).numpy()
        scale = blockwise(H_hat.abs(), S.abs()).max().item()
        diagonal = torch.diag_embed(S.diagonal(dim1=1, dim2=2))
        if torch.equal(S, diagonal):
            wrong = base.not_applicable("S is diagonal")
        else:
            wrong = base.equal(blockwise(H_hat, diagonal).numpy(), hessian, scale)
        return [base.equal(blockwise(H_hat, S).numpy(), hessian, scale), wrong]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """One image of two pixels, a 1×1 kernel, and ½ (vᵀa)², all integers: S = vvᵀ."""
        h, v = np.random.default_rng(seed).integers(1, 6, (2, 2)).tolist()
        rows = [[1, h[0]], [1, h[1]]]
        summed = [sum(v[k] * rows[k][i] for k in range(2)) for i in range(2)]
        right = [a * b for a in summed for b in summed]
        wrong = [sum(v[k] ** 2 * rows[k][i] * rows[k][j] for k in range(2)) for i in range(2) for j in range(2)]
        text = f"∇² = {right}, Ĥᵀ diag(S) Ĥ = {wrong} (row by row) for pixels h and the loss ½ (vᵀa)²: [h, v]"
        yield base.Counterexample(self.claims[1].name, [h, v], text, float(base.discrepancy(wrong, right)))


#: Number of products that compare two Hessians; errors of double backward: relative, and in units of round-off.
VECTORS, BACKWARD, UNITS = 3, 1e-10, 1e3


def same_unit(observation: base.Observation) -> base.Outcome:
    """Whether the Hessian of a unit in training is what double backward gives, with features on one scale."""
    network, block = observation.network, observation.hessian
    assert network is not None
    assert block is not None
    H = network.of_unit(observation.unit)
    scales = block.scales().to(H.device, torch.float64)
    scales = torch.where(scales > 0, scales, 1.0)[:, None]
    v = torch.randn(H.order, VECTORS, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu").to(
        H.device
    )
    products = block.product(v / scales) / scales
    expected = (H @ (v / scales).to(H.dtype)).to(torch.float64) / scales
    allowed = max(BACKWARD, UNITS * float(torch.finfo(H.dtype).eps))
    return base.equal(products.cpu().numpy(), expected.cpu().numpy(), allowed=allowed)


def blockwise(H_hat: Tensor, S: Tensor) -> Tensor:
    """ĤᵀSĤ; Ĥ (N, p, n̂), S (N, p, p)."""
    return torch.einsum("jpa,jpq,jqb->ab", H_hat, S, H_hat)


#: Statistics of every layer: μ and σ.
Statistics = list[tuple[Tensor, Tensor]]


#: γ and β of B before each layer.
Affine = Sequence[tuple[Tensor, Tensor]]


def normalized_output(
    network: networks.Network, weights: Sequence[Tensor], affine: Affine | None = None, *, through: bool
) -> tuple[Tensor, Statistics]:
    """The output (N, c) of the network with B before each layer, and the statistics of the batch there.

    Without ``affine`` it is B₀,₁; ``through`` says whether the gradient goes through μ and σ.
    """
    h, statistics = network.inputs, []
    for number, weight in enumerate(weights):
        h = networks.ACTIVATIONS[network.activation](h) if number else h
        mu, sigma = h.mean(0), h.std(0, correction=0)
        if not through:
            mu, sigma = mu.detach(), sigma.detach()
        statistics.append((mu.detach(), sigma.detach()))
        h = (h - mu) / sigma
        if affine is not None:
            gamma, beta = affine[number]
            h = gamma * h + beta
        h = networks.extended(h) @ weight.T
    return h, statistics


def normalized_loss(
    network: networks.Network, weights: Sequence[Tensor], *, through: bool
) -> tuple[Tensor, Statistics]:
    """The mean loss of the network with B₀,₁ before each layer, and the statistics of the batch there."""
    output, statistics = normalized_output(network, weights, through=through)
    return networks.CRITERIA[network.criterion](output, network.targets).mean(), statistics


def nearly_constant(statistics: Statistics) -> bool:
    """Whether a feature loses digits by centring."""
    return any((sigma <= FLAT * mu.abs()).any() for mu, sigma in statistics)


def order_one(rng: np.random.Generator, network: networks.Network) -> networks.Network:
    """Copy of a network with weights for inputs of order one, such as normalized ones: activations do not saturate."""
    drawn = [torch.from_numpy(rng.standard_normal(weight.shape)) for weight in network.weights]
    return replace(network, weights=tuple(weight / weight.shape[1] ** 0.5 for weight in drawn))


def merged(weight: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
    """P z for rows z = [b, w], P = U D: w/σ and b − wᵀμ/σ."""
    w = weight[:, 1:] / sigma
    return torch.cat([weight[:, :1] - (w @ mu)[:, None], w], 1)


def gradients(loss: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of a loss with respect to ``weights``."""
    return list(torch.autograd.grad(loss, list(weights)))


def leaves(weights: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors that require gradients."""
    return [weight.detach().clone().requires_grad_() for weight in weights]


@base.register
class BNPProposition7(base.Statement):
    """A gradient step under batch normalization is a BNP step of the network with the normalization merged in."""

    id = "bnp-proposition-7"
    title = "a step with BN is a BNP step of the merged network"
    source = "BNP, Proposition 7"
    text = (
        "With B₀,₁ before each layer, one gradient step in its weights, merged into the plain network with the old "
        "statistics, is one BNP step of that network (ε = 0, q = 1, statistics of the batch). True if the gradient "
        "does not go through μ and σ; if it does, all layers before the last get another step. For a convolution "
        "true only if the merged network pads with μ where the normalized one pads with 0."
    )
    hypotheses = (
        "the gradient does not go through μ and σ",
        "no feature is constant on the batch",
        "for a convolution: the border is padded with μ",
    )
    claims = (
        base.Claim("dense", "P (z − α ∇_z) = ŵ − α P Pᵀ ∇_ŵ in every layer", True),
        base.Claim(
            "gradient through μ, σ", "the same, with the gradient of batch normalization", False, published=False
        ),
        base.Claim("convolution, border of μ", "P (z − α ∇_z) = ŵ − α P Pᵀ ∇_ŵ", True),
        base.Claim("convolution, border of 0", "the same, both networks padded with 0", False, published=False),
    )
    trials = 100

    def step(self, gradient: Tensor, mu: Tensor, sigma: Tensor) -> Tensor:
        """P Pᵀ for rows [G_b, G_w], as Algorithm 2 writes it out."""
        G_b, G_w = gradient[:, :1], gradient[:, 1:]
        new = (G_w - G_b * mu) / sigma**2
        return torch.cat([G_b - (new @ mu)[:, None], new], 1)

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        hidden = rng.integers(2, 8, rng.integers(1, 4)).tolist()
        sizes = [random_size(rng), *hidden, int(rng.integers(2, 5))]
        network = networks.random_network(rng, sizes, int(rng.integers(10, 60)))
        dense = [self.dense(network, through=through) for through in (False, True)]
        return [*dense, *self.convolution(networks.random_convolution(rng))]

    def dense(self, network: networks.Network, *, through: bool) -> base.Outcome:
        """All layers of a network."""
        z = leaves(network.weights)
        loss, statistics = normalized_loss(network, z, through=through)
        if any((sigma == 0).any() for _, sigma in statistics):
            return base.not_applicable("a feature is constant on the batch")
        plain = leaves([merged(weight.detach(), *known) for weight, known in zip(z, statistics, strict=True)])
        changes = zip(gradients(loss, z), gradients(network.loss(plain), plain), statistics, strict=True)
        return worst([self.compare(*change) for change in changes])

    def compare(self, in_z: Tensor, in_plain: Tensor, known: tuple[Tensor, Tensor]) -> base.Outcome:
        """P ∇_z against P Pᵀ ∇_ŵ: the changes of the merged weights, which are the same before the step."""
        return base.equal(merged(in_z, *known).numpy(), self.step(in_plain, *known).numpy())

    def convolution(self, layer: networks.ConvolutionLayer) -> list[base.Outcome]:
        """One convolution, whose images come without a border, with either border of the merged network."""
        images, kernel = layer.inputs, layer.kernel
        mu, sigma = images.mean((0, 2, 3)), images.std((0, 2, 3), correction=0)
        if (sigma == 0).any():
            return [base.not_applicable("a channel is constant on the batch")] * 2
        by_channel = (slice(None), None, None)
        normalized = networks.bordered((images - mu[by_channel]) / sigma[by_channel], kernel)
        (z,) = leaves([layer.weight])
        (in_z,) = gradients(replace(layer, inputs=normalized).loss(z), [z])
        known = mu.repeat_interleave(kernel**2), sigma.repeat_interleave(kernel**2)
        (plain,) = leaves([merged(z.detach(), *known)])
        outcomes = []
        for border in (mu, torch.zeros_like(mu)):
            (in_plain,) = gradients(
                replace(layer, inputs=networks.bordered(images, kernel, border)).loss(plain), [plain]
            )
            outcomes.append(self.compare(in_z, in_plain, known))
        if kernel == 1:
            outcomes[1] = base.not_applicable("a 1×1 kernel has no border")
        return outcomes

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """Two samples −1 and 1 with ½ (v B(wx) − y)²; an image of two pixels and a 1×3 kernel."""
        rng = np.random.default_rng(seed)
        w, v, y = (int(i) for i in rng.integers(1, 6, 3))
        # B(wx) = x does not depend on w > 0, so its gradient is 0; with σ = w held fixed it is v Σ (v x − y) x / (2 w)
        held = Fraction(sum(v * (v * x - y) * x for x in (-1, 1)), 2 * w)
        text = f"∇_w = 0 through μ and σ, {held} without, for x = ∓1 and the loss ½ (v B(wx) − y)²: [w, v, y]"
        yield base.Counterexample(self.claims[1].name, [[w, v, y]], text, float(1 + abs(held)))
        h = int(rng.integers(1, 6))
        # pixels h ∓ 1: μ = h, σ = 1. Left of the first pixel BN has 0, and a border of 0 is −h once it is centred
        right, wrong = [0, -1, 1], [-h, -1, 1]
        text = f"w moves by {right} with BN, by {wrong} in the merged network, for pixels h ∓ 1 and the loss a_1: [h]"
        yield base.Counterexample(self.claims[3].name, [[h]], text, float(base.discrepancy(wrong, right)))


def affine_merged(weight: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """[b̂, Ŵ] = [b + Wβ, W diag(γ)] for rows [b, w]."""
    W = weight[:, 1:]
    return torch.cat([weight[:, :1] + (W @ beta)[:, None], W * gamma], 1)


@base.register
class BNPMerging(base.Statement):
    """Scale and shift of batch normalization merge into the layer that follows."""

    id = "bnp-merging"
    title = "γ and β merge into the next layer"
    source = "BNP, section 2 and Proposition 7"
    text = (
        "A layer behind B_β,γ = γ (h − μ)/σ + β is one behind B₀,₁ with Ŵ = W diag(γ) and b̂ = Wβ + b, so that theory "
        "may take γ = 1, β = 0. True of the function, and of gradients by the chain rule: ∇_W = ∇_Ŵ diag(γ) + ∇_b̂ βᵀ, "
        "∇_b = ∇_b̂, ∇_γ = diag(Wᵀ∇_Ŵ), ∇_β = Wᵀ∇_b̂. Of the function and its gradients, not of the iteration: a step "
        "in W, b, γ and β moves Ŵ and b̂ by something else than one in these."
    )
    hypotheses = ("no feature is constant on the batch",)
    claims = (
        base.Claim("function", "B_β,γ before W, b = B₀,₁ before Ŵ, b̂, in every layer", True),
        base.Claim("gradients", "those in W, b, γ, β are those in Ŵ, b̂ by the chain rule", True),
    )
    trials = 100

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A random network with γ and β before every layer."""
        sizes = [random_size(rng, 20), *rng.integers(2, 8, rng.integers(1, 3)).tolist(), int(rng.integers(2, 5))]
        network = order_one(rng, networks.random_network(rng, sizes, int(rng.integers(10, 60))))
        widths = [weight.shape[1] - 1 for weight in network.weights]
        draw = (torch.from_numpy(rng.standard_normal(width)) for width in widths for _ in range(2))
        gammas, betas = zip(*(((0.3 * next(draw)).exp(), next(draw)) for _ in widths), strict=True)
        parameters = leaves([*network.weights, *gammas, *betas])
        depth = len(widths)
        weights, gamma, beta = parameters[:depth], parameters[depth : 2 * depth], parameters[2 * depth :]
        merged_weights = leaves([affine_merged(*layer) for layer in zip(weights, gamma, beta, strict=True)])
        output, statistics = normalized_output(network, weights, list(zip(gamma, beta, strict=True)), through=True)
        if nearly_constant(statistics):
            return [base.not_applicable("a feature is nearly constant")] * 2
        plain = normalized_output(network, merged_weights, through=True)[0]
        criterion = networks.CRITERIA[network.criterion]
        derivatives, hat = (
            gradients(criterion(at, network.targets).mean(), inputs)
            for at, inputs in ((output, parameters), (plain, merged_weights))
        )
        right = [
            self.chain_rule(weights[number].detach(), gamma[number].detach(), beta[number].detach(), G_hat)
            for number, G_hat in enumerate(hat)
        ]
        by_layer = [part for kind in zip(*right, strict=True) for part in kind]
        return [
            base.equal(output.detach().numpy(), plain.detach().numpy()),
            # to the largest of all: where B comes next some gradients are sums that cancel
            base.equal(*(torch.cat([part.flatten() for part in side]).numpy() for side in (derivatives, by_layer))),
        ]

    def chain_rule(self, weight: Tensor, gamma: Tensor, beta: Tensor, G_hat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients in [b, W], γ and β of a layer from ``G_hat`` (m, n + 1) in [b̂, Ŵ]."""
        W, in_b, in_W = weight[:, 1:], G_hat[:, :1], G_hat[:, 1:]
        return torch.cat([in_b, in_W * gamma + in_b * beta], 1), (W * in_W).sum(0), (W * in_b).sum(0)


#: An ε that is rounded away.
NEGLIGIBLE = 1e-300


def under(plain: nn.Module, name: str, **options: Any) -> methods.Method:
    """The method of that name on a copy of the network."""
    return methods.method_class(name)(deepcopy(plain), **options)


@base.register
class BNPNormalizationLayers(base.Statement):
    """Batch, layer and group normalization: what they are invariant to, and batch renormalization in two forms."""

    id = "bnp-normalization-layers"
    title = "with normalized activations the scale of weights does not matter, with BNP it does"
    source = "BNP, eq. (3), and on batch, layer and group normalization"
    text = (
        "Group normalization with one group is layer normalization. Behind batch, layer or group normalization the "
        "loss L does not depend on the scale of the weights and biases w of the layer before, so that the Hessian H in "
        "them is divided by t² at tw, and κ is the same. BNP leaves the network as it is: L(tw) ≠ L(w). Batch "
        "renormalization, with the constants s = σ_B/σ and d = (μ_B − μ)/σ, has the values of a normalization by the "
        "running averages. The output f for one sample x depends on its batch behind batch normalization in training, "
        "and with the others it does not. True."
    )
    hypotheses = ("ε = 0, t > 0", "the normalization follows the layer (scale)", "s and d are not clipped")
    claims = (
        base.Claim("one group", "GN with one group = LN over channels and positions", True),
        base.Claim("scale", "L(tw) = L(w) and H(tw) = H(w)/t² with BN, LN, GN", True),
        base.Claim("scale, BNP", "L(tw) = L(w) and H(tw) = H(w)/t² with BNP", False, published=False),
        base.Claim("renormalization", "γ((h − μ_B)/σ_B s + d) + β = γ(h − μ)/σ + β", True),
        base.Claim("other samples", "f(x) is the same in a batch and for x alone, with LN, GN, BNP", True),
        base.Claim("other samples, BN", "f(x) is the same in a batch and for x alone, with BN", False, published=False),
    )
    trials = 40

    def trial(self, rng: np.random.Generator) -> Sequence[base.Outcome]:
        """A convolution, tanh and a dense layer, normalized behind the convolution."""
        c, units, N = rng.integers((1, 1, 3), (4, 4, 9)).tolist()
        conv = nn.utils.skip_init(nn.Conv2d, c, 2 * units, 2, dtype=torch.float64)
        dense = nn.utils.skip_init(nn.Linear, 8 * units, 2, dtype=torch.float64)
        plain = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), dense)
        for parameter in plain.parameters():
            parameter.data = normal(rng, *parameter.shape)
        x, y, t = normal(rng, N, c, 3, 3) + 1, normal(rng, N, 2), float(10.0 ** rng.uniform(-1, 1))
        by_groups = [under(plain, "groupnorm", eps=NEGLIGIBLE, groups=groups) for groups in (1, 2)]
        brn, bnp = under(plain, "batchrenorm", clip=False), under(plain, "bnp")
        several = [*(under(plain, name, eps=NEGLIGIBLE) for name in ("batchnorm", "layernorm")), by_groups[1], bnp]
        gamma, beta, mu, sigma = list(brn.model.get_submodule("0.after").state_dict().values())[:4]
        for values in (gamma, beta, mu, sigma):
            values.copy_(normal(rng, 2 * units).exp())
        constant = nn.functional.batch_norm(conv(x), mu, sigma**2, gamma, beta, eps=0.0)
        whole = nn.functional.layer_norm(conv(x), (2 * units, 2, 2), eps=NEGLIGIBLE)
        forms = [same(m.model(x), plain[1:](a)) for m, a in ((by_groups[0], whole), (brn, constant))]
        checks = [(invariant(m, x, y, t), same(m.model(x)[:1], m.model(x[:1]))) for m in several]
        scale, alone = zip(*checks, strict=True)
        return [forms[0], worst(scale[:3]), scale[3], forms[1], worst(alone[1:]), alone[0]]

    def counterexamples(self, seed: int) -> Iterator[base.Counterexample]:
        """½ (wx)²; and B(h) of one feature in two batches of two."""
        w, x = np.random.default_rng(seed).integers(1, 9, 2).tolist()
        yield base.Counterexample("scale, BNP", [[w, x]], "½ (wx)² is 4 times as large at 2w: [w, x]", 4.0)
        batches = [[w, w - 2 * x], [w, w + 2 * x]]
        far = float(base.discrepancy([1], [-1]))
        yield base.Counterexample("other samples, BN", batches, f"B(h) is 1, then −1 for h = {w}: batches", far)


def same(one: Tensor, other: Tensor) -> base.Outcome:
    """Whether two tensors are equal."""
    return base.equal(one.detach().numpy(), other.detach().numpy())


def invariant(method: methods.Method, x: Tensor, y: Tensor, t: float) -> base.Outcome:
    """Whether the loss at t times the first layer's parameters is the same, and its Hessian in them divided by t²."""
    name, found = method.layer("0"), []
    for factor in (1.0, t):
        for parameter in method.model.get_submodule(name).parameters():
            parameter.data *= factor
        H = HessianOperator(method.model, nn.functional.mse_loss, (x, y), layers=[name]).to_dense()
        found.append((nn.functional.mse_loss(method.model(x), y), factor**2 * H))
    return worst([same(*pair) for pair in zip(*found, strict=True)])


def worst(outcomes: Sequence[base.Outcome]) -> base.Outcome:
    """The outcome that counts for several equalities claimed together."""
    order = ("violated", "unresolved", "holds", "not-applicable")
    return min(outcomes, key=lambda outcome: (order.index(outcome.status), -outcome.used))
