"""Where normalizations of activations go, what they compute, and what they refuse."""

import numpy as np
import pytest
import torch
from torch import nn

from hesscond.errors import ConfigError
from hesscond.methods import parse
from hesscond.methods.batchnorm import BatchRenorm, OwnBatchNorm, StopGradientBatchNorm
from hesscond.methods.four_things import GhostNorm
from hesscond.methods.normalization import FeaturesLast
from hesscond.methods.wrapping import Wrapped
from hesscond.models import MLP
from tests.methods.contract import NETWORKS, MethodContract, digits, network

NAMES = ("batchnorm", "batchrenorm", "four-things-batchnorm", "layernorm", "groupnorm")
#: Activations of a dense layer, of one with tokens behind it, and of a convolution.
SHAPES = ((12, 6), (12, 6, 5), (12, 6, 3, 2))


class TestVariants(MethodContract):
    specs = (
        "batchrenorm:position=post,start=2,r_end=6,d_end=5,momentum=0.1",
        "batchrenorm:clip=false,debias=true,second_average=true",
        "four-things-batchnorm:position=post,ghost=4,groups=2,affine=false",
        "layernorm:position=post,affine=false",
        "groupnorm:position=post,groups=2,affine=false",
    )


class TestStatisticsOfTheBatch(MethodContract):
    specs = (
        "batchnorm:position=post",
        "batchnorm:position=post,affine=false,gradient_through_statistics=false",
        "batchnorm:position=post,running_variance=tensorflow",
        "batchnorm+bnp",
    )

    @pytest.mark.parametrize("kind", NETWORKS)
    def test_it_trains_or_says_why_not(self, spec, kind):
        # two samples are normalized to ±1 beside a dense layer, which leaves little to learn from
        super().test_it_trains_or_says_why_not(spec, (kind, torch.float64, 60))


def activations(shape, seed=0, dtype=torch.float64):
    """Of channels with very different means and variances."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(shape, generator=generator, dtype=torch.float64)
    channels = torch.arange(shape[1], dtype=torch.float64).view(-1, *[1] * (len(shape) - 2))
    return (h * (0.3 + channels) + channels - 1).to(dtype)


def with_affine(module):
    """The module in double precision with γ and β that are neither 1 nor 0."""
    module = module.double()
    with torch.no_grad():
        module.weight.copy_(torch.linspace(0.5, 2, len(module.weight), dtype=torch.float64))
        module.bias.copy_(torch.linspace(-1, 1, len(module.bias), dtype=torch.float64))
    return module


def by_channel(values, ndim):
    return np.asarray(values).reshape(-1, *[1] * (ndim - 2))


def close(found, truth, scale=1.0):
    np.testing.assert_allclose(found.detach().numpy(), truth, rtol=1e-11, atol=1e-12 * scale)


def places(model):
    """For every layer with something around it the modules before and after it."""
    return {
        name: tuple(type(getattr(own, side)) if hasattr(own, side) else None for side in ("before", "after"))
        for name, own in model.named_modules()
        if isinstance(own, Wrapped)
    }


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("name", NAMES)
def test_normalizations_are_before_or_after_the_activations(name, position, kind):
    model = network(kind)
    method = parse(f"{name}:position={position}").create(model)
    layers = {"mlp": ["fc1", "fc2", "fc3"], "cnn": ["0", "3", "6"]}[kind]
    side, chosen = ("after", layers[:-1]) if position == "pre" else ("before", layers[1:])
    assert list(places(model)) == chosen
    assert all(hasattr(model.get_submodule(n), side) for n in chosen)
    assert method.layer(chosen[0]) == f"{chosen[0]}.layer"
    x, _ = digits()
    seen = []
    (model.activation1 if kind == "mlp" else model[1]).register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    entering = []
    model.get_submodule(f"{layers[1]}.layer").register_forward_pre_hook(lambda m, a: entering.append(a[0]))
    model(x[:15])
    # what the activation or the next layer takes
    h = seen[0] if position == "pre" else entering[0]
    over = (0, *range(2, h.ndim)) if "batch" in name else tuple(range(1, h.ndim))
    variance, mean = torch.var_mean(h, over, correction=0)
    assert mean.abs().max() < 1e-12
    assert 0.95 < variance.max() < 1 + 1e-9


def test_layers_that_are_named_are_normalized():
    model = network("mlp")
    parse("batchnorm:layers=fc1/fc3").create(model)
    assert places(model) == {"fc1": (None, FeaturesLast), "fc3": (None, FeaturesLast)}


@pytest.mark.parametrize("dimensions", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_convolutions_of_every_dimension(name, dimensions):
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[dimensions]
    torch.manual_seed(0)
    model = nn.Sequential(conv(2, 4, 2), nn.ReLU(), conv(4, 3, 2)).double()
    parse(name).create(model)
    model(torch.randn(5, 2, *[4] * dimensions, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- what they compute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_without_gradient_through_its_statistics_it_is_torchs_forward(shape):
    ours = with_affine(StopGradientBatchNorm(6, eps=1e-3, momentum=0.3))
    peer = with_affine({2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](6, eps=1e-3, momentum=0.3))
    for step in range(4):
        h = activations(shape, seed=step)
        assert torch.allclose(ours(h), peer(h), rtol=1e-12, atol=1e-12)
    for (name, own), (_, other) in zip(ours.state_dict().items(), peer.state_dict().items(), strict=True):
        assert torch.allclose(own, other, rtol=1e-13), name
    assert torch.allclose(ours.eval()(h), peer.eval()(h), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_gradient_through_its_statistics_the_derivative_is_gamma_over_sigma(shape):
    norm = with_affine(StopGradientBatchNorm(6, eps=1e-3))
    h = activations(shape).requires_grad_()
    v = activations(shape, seed=9)
    (gradient,) = torch.autograd.grad((norm(h) * v).sum(), h)
    over = (0, *range(2, len(shape)))
    sigma = np.sqrt(h.detach().numpy().var(over) + 1e-3)
    close(gradient, by_channel(np.linspace(0.5, 2, 6) / sigma, len(shape)) * v.numpy(), 10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [OwnBatchNorm, StopGradientBatchNorm])
def test_a_biased_running_variance_is_the_average_of_those_that_the_batches_are_divided_by(kind, shape):
    norm, variance = with_affine(kind(6, eps=1e-3, momentum=0.3, biased=True)), np.ones(6)
    mean = np.zeros(6)
    over = (0, *range(2, len(shape)))
    for step in range(4):
        h = activations(shape, seed=step)
        norm(h)
        mean, variance = 0.7 * mean + 0.3 * h.numpy().mean(over), 0.7 * variance + 0.3 * h.numpy().var(over)
    m, v, g, b = (by_channel(u, len(shape)) for u in (mean, variance, np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)))
    close(norm.eval()(h), g * (h.numpy() - m) / np.sqrt(v + 1e-3) + b, 10)


def test_tensorflows_running_variance_is_biased_beside_dense_layers_only():
    model = network("cnn")
    parse("batchnorm:position=post,running_variance=tensorflow,eps=0.001,momentum=0.01").create(model)
    x, _ = digits()
    model(x[:6])
    convolution, dense = model[3].before, model[6].before.normalization
    assert type(convolution) is nn.BatchNorm2d
    assert (convolution.eps, convolution.momentum) == (0.001, 0.01)
    seen = []
    dense.register_forward_hook(lambda m, a, y: seen.extend((a[0].detach().numpy(), y)))
    before = dense.running_var.numpy().copy()
    model(x[:6])
    h, y = seen
    close(y, (h - h.mean(0)) / np.sqrt(h.var(0) + 1e-3), 10)
    np.testing.assert_allclose(dense.running_var.numpy(), 0.99 * before + 0.01 * h.var(0), rtol=1e-10)


class Renormalized:
    """Algorithm 1 of Ioffe (2017) in numpy."""

    def __init__(self, channels, r_max, d_max, alpha, eps):
        self.mu, self.sigma = np.zeros(channels), np.ones(channels)
        self.r_max, self.d_max, self.alpha, self.eps = r_max, d_max, alpha, eps

    def step(self, h, gamma, beta):
        over = (0, *range(2, h.ndim))
        mu_B, sigma_B = h.mean(over), np.sqrt(self.eps + h.var(over))
        r = np.clip(sigma_B / self.sigma, 1 / self.r_max, self.r_max)
        d = np.clip((mu_B - self.mu) / self.sigma, -self.d_max, self.d_max)
        m, s, r_, d_, g, b = (by_channel(v, h.ndim) for v in (mu_B, sigma_B, r, d, gamma, beta))
        y = g * ((h - m) / s * r_ + d_) + b
        self.mu = self.mu + self.alpha * (mu_B - self.mu)
        self.sigma = self.sigma + self.alpha * (sigma_B - self.sigma)
        return y, r, d


class Debiased(Renormalized):
    """TensorFlow 1.13's renorm=True in numpy: sums from zero beside their weight, mixed with the batch's moments."""

    def __init__(self, channels, r_max, d_max, alpha, eps):
        super().__init__(channels, r_max, d_max, alpha, eps)
        self.sum_mu, self.sum_sigma, self.weight = np.zeros(channels), np.zeros(channels), 0.0
        self.moving_mean, self.moving_variance = np.zeros(channels), np.ones(channels)

    def step(self, h, gamma, beta):
        over = (0, *range(2, h.ndim))
        mu_B, sigma_B = h.mean(over), np.sqrt(self.eps + h.var(over))
        self.mu = self.sum_mu + (1 - self.weight) * mu_B
        self.sigma = self.sum_sigma + (1 - self.weight) * sigma_B
        found = super().step(h, gamma, beta)
        self.sum_mu += self.alpha * (mu_B - self.sum_mu)
        self.sum_sigma += self.alpha * (sigma_B - self.sum_sigma)
        self.weight += self.alpha * (1 - self.weight)
        self.mu, self.sigma = self.sum_mu / self.weight, self.sum_sigma / self.weight
        self.moving_mean += self.alpha * (self.mu - self.moving_mean)
        self.moving_variance += self.alpha * (self.sigma**2 - self.eps - self.moving_variance)
        return found


def renorm(channels=6, *, r_max=3.0, d_max=5.0, start=0, r_end=0, d_end=0, momentum=0.2, eps=1e-3, **options):
    return with_affine(
        BatchRenorm(
            channels,
            r_max=r_max,
            d_max=d_max,
            start=start,
            r_end=r_end,
            d_end=d_end,
            momentum=momentum,
            eps=eps,
            affine=True,
            **options,
        )
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("r_max", "d_max"), [(1.2, 0.2), (1.5, 0.5), (np.inf, np.inf)])
@pytest.mark.parametrize("how", ["paper", "debias", "second_average"])
def test_batch_renormalization_is_algorithm_1(shape, r_max, d_max, how):
    """Or TensorFlow's, which infers by an average of the debiased averages."""
    ours = renorm(r_max=r_max, d_max=d_max, debias=how != "paper", second_average=how == "second_average")
    truth = (Renormalized if how == "paper" else Debiased)(6, r_max, d_max, 0.2, 1e-3)
    gamma, beta = np.linspace(0.5, 2, 6), np.linspace(-1, 1, 6)
    clipped = 0
    for step in range(5):
        h = 2**step * activations(shape, seed=step)
        expected, r, d = truth.step(h.numpy(), gamma, beta)
        clipped += np.isin(r, [r_max, 1 / r_max]).sum() + (np.abs(d) == d_max).sum()
        close(ours(h), expected, 10)
    assert (clipped > 0) == (r_max < np.inf)
    mean, sigma = truth.mu, truth.sigma
    if how == "second_average":
        mean, sigma = truth.moving_mean, np.sqrt(truth.moving_variance + 1e-3)
    mu, sigma, g, b = (by_channel(v, len(shape)) for v in (mean, sigma, gamma, beta))
    close(ours.eval()(h), g * (h.numpy() - mu) / sigma + b, 10)


def test_without_clipping_there_is_no_warm_up():
    model = network("mlp")
    parse("batchrenorm:clip=false,debias=true").create(model)
    norm = next(m for m in model.modules() if isinstance(m, BatchRenorm))
    far = torch.full((20,), 1e9, dtype=torch.float64)
    norm.num_batches_tracked.fill_(10**4)
    r, d = norm.correction(far, far)
    close(r, np.full(20, 1e9))
    close(d, np.full(20, 1e9))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_corrections_of_renormalization_are_constants_to_its_derivative(shape):
    norm = renorm(r_max=1.5, d_max=0.5)
    h = activations(shape, seed=3).requires_grad_()
    v = activations(shape, seed=9)
    _, r, d = Renormalized(6, 1.5, 0.5, 0.2, 1e-3).step(h.detach().numpy(), 1, 0)
    over = (0, *range(2, h.ndim))
    variance, mean = torch.var_mean(h, over, correction=0, keepdim=True)
    r, d = (torch.from_numpy(by_channel(u, h.ndim)) for u in (r, d))
    gamma = torch.from_numpy(by_channel(np.linspace(0.5, 2, 6), h.ndim))
    plain = gamma * ((h - mean) / (variance + 1e-3).sqrt() * r + d)
    (truth,) = torch.autograd.grad((plain * v).sum(), h)
    (found,) = torch.autograd.grad((norm(h) * v).sum(), h)
    assert torch.allclose(found, truth, rtol=1e-9, atol=1e-11)


def test_the_bounds_of_renormalization_grow_as_in_the_paper():
    """r_max = 1 and d_max = 0 for 5k steps, then linearly to 3 at 40k and to 5 at 25k."""
    norm = renorm(start=5000, r_end=40000, d_end=25000)
    far = torch.full((6,), 1e9, dtype=torch.float64)
    for step, r_max, d_max in [(0, 1, 0), (5000, 1, 0), (15000, 1 + 2 * 10 / 35, 2.5), (40000, 3, 5), (10**6, 3, 5)]:
        norm.num_batches_tracked.fill_(step)
        r, d = norm.correction(far, far)
        close(r, np.full(6, r_max))
        close(d, np.full(6, d_max))
        r, d = norm.correction(-far, 1 / far)
        close(r, np.full(6, 1 / r_max))
        close(d, np.full(6, -d_max))


def ghost_norm(channels=6, groups=6, *, ghost=4, example_weight=0.3, momentum=0.2, eps=1e-3):
    return with_affine(
        GhostNorm(channels, groups, ghost=ghost, example_weight=example_weight, momentum=momentum, eps=eps, affine=True)
    )


def normalized_groups(h, groups, mean, square, eps=1e-3):
    """(n, C, …) in numpy by moments (n or 1, G) of the groups."""
    flat = h.reshape(len(h), groups, -1)
    variance = square - mean**2
    return ((flat - mean[..., None]) / np.sqrt(variance + eps)[..., None]).reshape(h.shape)


def affine(h):
    return by_channel(np.linspace(0.5, 2, 6), h.ndim) * h + by_channel(np.linspace(-1, 1, 6), h.ndim)


@pytest.mark.parametrize("groups", [6, 3, 2, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("samples", "parts"), [(12, [4, 4, 4]), (11, [6, 5]), (3, [3]), (8, [4, 4])])
def test_ghost_batches_and_groups_share_their_moments(shape, groups, samples, parts):
    norm = ghost_norm(groups=groups)
    h = activations(shape)[:samples]
    truth = []
    for part in np.split(h.numpy(), np.cumsum(parts)[:-1]):
        values = np.moveaxis(part.reshape(len(part), groups, -1), 1, 0).reshape(groups, -1)
        truth.append(normalized_groups(part, groups, values.mean(1)[None], (values**2).mean(1)[None]))
    close(norm(h), affine(np.concatenate(truth)), 10)


@pytest.mark.parametrize("groups", [6, 3, 1])
@pytest.mark.parametrize("shape", SHAPES)
def test_at_inference_the_moments_are_a_mixture_with_the_examples_own(shape, groups):
    norm = ghost_norm(groups=groups)
    m, m2 = np.zeros(6), np.ones(6)
    over = (0, *range(2, len(shape)))
    for step in range(3):
        h = activations(shape, seed=step)
        norm(h)
        m = 0.8 * m + 0.2 * h.numpy().mean(over)
        m2 = 0.8 * m2 + 0.2 * (h.numpy() ** 2).mean(over)
    norm.eval()
    x = activations(shape, seed=7).numpy()
    own = x.reshape(len(x), groups, -1)
    mean = 0.7 * m.reshape(groups, -1).mean(1) + 0.3 * own.mean(2)
    square = 0.7 * m2.reshape(groups, -1).mean(1) + 0.3 * (own**2).mean(2)
    close(norm(torch.from_numpy(x)), affine(normalized_groups(x, groups, mean, square)), 10)


def test_gamma_decays_towards_one_and_beta_towards_zero():
    model = network("mlp")
    method = parse("four-things-batchnorm:weight_decay=0.2").create(model)
    norms = [m for m in model.modules() if isinstance(m, GhostNorm)]
    assert len(norms) == 2
    for norm in norms:
        with_affine(norm)
    method.penalty(torch.zeros(())).backward()
    for norm in norms:
        close(norm.weight.grad, 0.2 * (np.linspace(0.5, 2, 20) - 1))
        close(norm.bias.grad, 0.2 * np.linspace(-1, 1, 20))
    assert {p.grad is None for name, p in model.named_parameters() if "layer" in name} == {True}
    bare = parse("four-things-batchnorm:affine=false").create(network("mlp"))
    assert bare.penalty(torch.zeros(())) is None


def tokens():
    """As many tokens as features, which torch's own module would take for the channels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).double()
    return model, torch.randn(4, 5, 3, dtype=torch.float64)


@pytest.mark.parametrize(
    ("spec", "make", "over"),
    [
        ("batchnorm", tokens, (0, 1)),
        ("batchnorm:gradient_through_statistics=false", tokens, (0, 1)),
        ("layernorm", tokens, -1),
        ("layernorm", lambda: (network("cnn"), digits()[0][:5]), (1, 2, 3)),
    ],
)
def test_statistics_are_over_tokens_or_of_each_token_and_over_channels_and_positions(spec, make, over):
    model, h = make()
    parse(spec).create(model)
    a = model[0].layer(h).detach().numpy()
    close(model[0](h), (a - a.mean(over, keepdims=True)) / np.sqrt(a.var(over, keepdims=True) + 1e-5), 10)


# -- probes and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES[:3])
def test_a_single_sample_has_no_statistics(name):
    model = network("mlp")
    method = parse(name).create(model)
    method.check_batch(2)
    with pytest.raises(ConfigError, match="batch size above 1"):
        method.check_batch(1)
    with pytest.raises(ValueError, match=r"[Ee]xpected more than 1 value|more than one value"):
        model(digits()[0][:1])
    # the same one twice: what is normalized is β, and no gradient reaches the layers before
    model(digits()[0][[0, 0]]).square().sum().backward()
    assert [bool(list(model.parameters())[place].grad.any()) for place in (0, -1)] == [False, True]
    # groups of channels have
    model = network("mlp")
    parse("four-things-batchnorm:groups=2").create(model).check_batch(1)
    assert torch.isfinite(model(digits()[0][:1])).all()


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("groupnorm:groups=3", "the 20 channels at layer 'fc1' do not split into 3 groups .* among 1, 2, 4, 5, 10"),
        ("four-things-batchnorm:ghost=1", "a ghost batch of 1 has no statistics"),
        ("batchnorm:eps=0", "eps must be above 0"),
        ("batchnorm:position=inside", "must be 'pre' or 'post'"),
        ("batchnorm:layers=fc9", "no layer 'fc9' to choose"),
        # at a later layer
        ("groupnorm 6 5", "the 5 channels at layer 'fc2'"),
        ("layernorm 1", "a group needs two values"),
        ("groupnorm:groups=1 1", "a group needs two values"),
        ("batchnorm:position=pre 0", "no dense or convolutional layer"),
        ("batchnorm:position=post 0", "no dense or convolutional layer"),
    ],
)
def test_what_cannot_be_meant_is_refused_and_leaves_the_model_as_it_was(spec, sentence):
    """Of the network of all these tests, or of one with hidden layers of these widths."""
    spec, *widths = spec.split()
    hidden = [int(width) for width in widths if width != "0"]
    model = MLP(4, hidden, 2, generator=torch.Generator().manual_seed(0)) if hidden else network("mlp")
    model = nn.Sequential(nn.Linear(3, 2)) if widths == ["0"] else model
    with pytest.raises(ConfigError, match=sentence):
        parse(spec).create(model)
    assert not places(model)


def test_a_channel_of_a_convolution_is_a_group():
    model = nn.Sequential(*(nn.Conv2d(n, m, 1) for n, m in [(3, 16), (16, 32), (32, 2)]))
    parse("groupnorm:groups=16").create(model)
    assert {m.num_channels: m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {16: 16, 32: 16}
