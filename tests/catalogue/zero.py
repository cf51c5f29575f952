"""Hessians that are zero."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add, double
from tests.catalogue.parts import CE, MSE, Net, classes, elementwise, named, scaled_loss, stepped, values
from tests.catalogue.truths import Truth, formula_truth, stream_truth

row = functools.partial(add, "Hessians that are zero", close=None)
small = functools.partial(add, "Hessians that are small and not zero", close=None, control=True)


def small_classes():
    return classes(14, 4, 3)


def zero(name, title, net, loss=CE, data=small_classes, *, layers=("shift",), others=(), **facts):
    """Register a construction in which the rows of these layers, and these parameters, are exactly zero."""
    names = [f"{layer}.{part}" for layer in layers for part in ("weight", "bias")] + list(others)

    def truth(model, loss_fn, batch, options):
        there = dict(model.named_parameters())
        return Truth(double(model), loss_fn, batch, zero=[one for one in names if one in there])

    facts.setdefault("layer", layers[0] if layers else "0")
    row(name, title, lambda: (net(), loss, data()), truth=truth, **facts)


def shift(m, x):
    return m.net(x) + m.shift(x)


zero("softmax_shift", "a layer that shifts all logits alike",
    lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)))  # fmt: skip
zero("softmax_shift_deep", "a hidden and an output layer that shift all logits alike",
    lambda: Net(lambda m, x: m.net(x) + m.out(m.hidden(x).tanh()), net=nn.Linear(4, 3),
        hidden=nn.Linear(4, 3), out=nn.Linear(3, 1)), layers=["hidden", "out"])  # fmt: skip
zero("softmax_shift_only", "nothing but a shift of all logits: a network whose Hessian is zero",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(4, 1)))  # fmt: skip
for exponent in (-30, 30):
    zero(f"softmax_shift_{exponent}", f"a layer that shifts all logits alike, loss × 1e{exponent}",
        lambda: Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)), scaled_loss(10.0**exponent, CE))  # fmt: skip
zero("single_class", "cross-entropy of one class",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)), data=lambda: classes(12, 4, 1),
    layers=["0", "2"])  # fmt: skip


def scale_free(m, x):
    return m.out(F.normalize(m.features(x).tanh() * m.scale(x.new_ones(1, 1)).exp(), dim=1))


zero("normalized_scale", "scale before a normalization",
    lambda: Net(scale_free, features=nn.Linear(4, 3), scale=nn.Linear(1, 1), out=nn.Linear(3, 3)),
    layers=["scale"], borderline=True)  # fmt: skip
zero("cosine_scale", "scale of one side of a cosine similarity",
    lambda: Net(lambda m, x: (3 * F.cosine_similarity(m.a(x)[:, None] * m.scale(x[:, :2]).exp()[:, :, None],
                m.b.weight[None], dim=2)), a=nn.Linear(4, 3), b=nn.Linear(3, 3), scale=nn.Linear(2, 1)),
    layers=["scale"])  # fmt: skip


def equal_values(m, x):
    tokens = m.value(x)[:, None].expand(-1, 4, -1)
    q, k = (
        m.query(x)[:, None] + torch.arange(4.0).to(x)[:, None],
        m.key(x)[:, None] * torch.linspace(1, 2, 4).to(x)[:, None],
    )
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ tokens).mean(1)


zero("equal_values", "queries and keys over equal values",
    lambda: Net(equal_values, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3),
        out=nn.Linear(3, 3)), layers=["query", "key"])  # fmt: skip


def keys(m, x):
    q, k, v = m.query(x), m.key(x), m.value(x)
    return m.out((q @ k.transpose(1, 2)).softmax(2) @ v).mean(1)


zero("key_bias", "bias of the keys of an attention",
    lambda: Net(keys, query=nn.Linear(4, 3), key=nn.Linear(4, 3), value=nn.Linear(4, 3),
        out=nn.Linear(3, 3)), data=lambda: (torch.randn(10, 3, 4), torch.randint(0, 3, (10,))), layers=[],
    others=["key.bias"], layer="key bias", levels=("layer",),
    options={"blocks": {"key bias": ["key.bias"]}})  # fmt: skip
zero("bias_before_batch_norm", "bias before batch normalization in training mode",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3)), layers=[],
    others=["0.bias"], layer="bias", levels=("layer",), options={"blocks": {"bias": ["0.bias"]}})  # fmt: skip
zero("constant_into_batch_norm", "layer on constants before batch normalization in training mode",
    lambda: Net(lambda m, x: m.out(m.norm(m.constant(torch.ones_like(x)) + m.own(x))),
        constant=nn.Linear(4, 3), own=nn.Linear(4, 3), norm=nn.BatchNorm1d(3), out=nn.Linear(3, 3)),
    layers=["constant"])  # fmt: skip
zero("shift_before_layer_norm", "a shift of all features before layer normalization",
    lambda: Net(lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))), own=nn.Linear(4, 3),
        shift=nn.Linear(4, 1), norm=nn.LayerNorm(3), out=nn.Linear(3, 3)))  # fmt: skip
zero("dueling_one_action", "dueling head with one action: its advantage",
    lambda: Net(lambda m, x: m.value(x) + m.advantage(x) - m.advantage(x).mean(1, keepdim=True),
        value=nn.Linear(4, 1), advantage=nn.Linear(4, 1)), MSE, lambda: values(14, 4, 1),
    layers=["advantage"])  # fmt: skip


def dueling(m, x):
    h = m.trunk(x).tanh()
    advantage = m.advantage(h)
    return m.value(h) + advantage - advantage.mean(1, keepdim=True)


zero("dueling_policy", "dueling head, its value behind a softmax policy",
    lambda: Net(dueling, trunk=nn.Linear(4, 3), advantage=nn.Linear(3, 3), value=nn.Linear(3, 1)),
    layers=["value"])  # fmt: skip
zero("softmax_sum", "sum of a softmax", lambda: nn.Sequential(nn.Linear(4, 3)),
    lambda o, t: (o.softmax(1).sum(1) - 1.5).square().mean(), layers=["0"])  # fmt: skip
zero("sine_and_cosine", "sin² + cos²", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.sin() ** 2 + o.cos() ** 2).mean(), layers=["0"])  # fmt: skip
zero("logarithm_of_exponential", "log(exp(z)) − 2z", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: (o.exp().log() - 2 * o).mean(), layers=["0"])  # fmt: skip
zero("softplus_difference", "softplus(z) − softplus(−z), which is z",
    lambda: nn.Sequential(nn.Linear(4, 2)), lambda o, t: (F.softplus(o) - F.softplus(-o)).mean(),
    layers=["0"])  # fmt: skip
zero("odd_pairs", "tanh(z) + tanh(−z) behind a hidden layer",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.SiLU(), nn.Linear(3, 2)),
    lambda o, t: (o.tanh() + (-o).tanh() + 0.1).mean(), layers=["0", "2"])  # fmt: skip
zero("ratio", "a ratio of equal quantities", lambda: nn.Sequential(nn.Linear(4, 3), nn.Softplus()),
    lambda o, t: (o / o.sum(1, keepdim=True)).sum(1).mean(), layers=["0"])  # fmt: skip
zero("linear_loss", "loss linear in the outputs", lambda: nn.Sequential(nn.Linear(4, 2)),
    lambda o, t: o.mean(), layers=["0"])  # fmt: skip
zero("l1_output", "L1 loss of a linear model", lambda: nn.Sequential(nn.Linear(4, 3)), nn.L1Loss(),
    lambda: values(14, 4, 3), layers=["0"])  # fmt: skip


def opposed():
    """Every sample twice."""
    x, y = small_classes()
    return torch.cat([x, x]), torch.cat([y, y])


def opposed_loss(output, target):
    sign = torch.ones(len(output), dtype=output.dtype)
    sign[len(output) // 2 :] = -1
    return (sign * F.cross_entropy(output, target, reduction="none")).sum()


zero("opposed_samples", "every sample twice, with weights +1 and −1",
    lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), opposed_loss, opposed,
    layers=["0", "2"])  # fmt: skip


def two_sources(output, target):
    """The same sum in two orders of operations."""
    p = output.log_softmax(1)
    return (output.logsumexp(1) - output[:, 0] + p[:, 0]).mean()


zero("two_formulas", "a loss minus itself by another formula", lambda: nn.Sequential(nn.Linear(4, 3)),
    two_sources, layers=["0"])  # fmt: skip
zero("shift_float64_wide", "a layer that shifts 40 logits alike, features over six decades, float64",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x), net=nn.Linear(4, 40), shift=nn.Linear(4, 1)).double(),
    data=lambda: (torch.randn(30, 4).double() * torch.tensor([1e-3, 1, 1e3, 1]).double(),
        torch.randint(0, 40, (30,))), levels=("unit", "layer"), options={"layers": ["shift"]})  # fmt: skip


def softmax_shift_stream():
    x, y = classes(17)
    model = Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1))
    return model, CE, [(x[:6], y[:6]), (x[6:12], y[6:12]), (x[12:], y[12:])]


row("softmax_shift_stream", "a layer that shifts all logits alike, ragged stream", softmax_shift_stream, "shift",
    truth=stream_truth(double, zero=["shift.weight", "shift.bias"]))  # fmt: skip


def samples_without_curvature(curved):
    """The loss z²/2 of the first samples, and a function of no curvature, by a difference, of the others."""

    def loss(o):
        moved = o[curved:] + torch.tensor([0.0, 1.0, 2.5]).to(o)
        return torch.cat([o[:curved].square() / 2, moved.logsumexp(1, keepdim=True) - o[curved:]])

    return loss


def masked_formula(curved, small=0.0):
    def formula(mp, own, rows):
        z = (rows @ own["0.weight"].T + own["0.bias"])[:, 0]
        factors = [mp.mpf(1) if number < curved else mp.mpf(small) for number in range(len(z))]
        return sum(f * one**2 / 2 for f, one in zip(factors, z, strict=True)) / len(z)

    return formula


for curved, scale in [(3, 3), (3, 0), (2, 3), (1, 1), (0, 2)]:

    def curved_make(curved=curved, scale=scale):
        x = (torch.randn(14, 4) * torch.logspace(-scale, scale, 4)).double()
        loss = samples_without_curvature(curved)
        return nn.Sequential(nn.Linear(4, 1)).double(), lambda o, t: loss(o).mean(), (x, torch.zeros(14, 1).double())

    row(f"curved_{curved}_scale_{scale}",
        f"{14 - curved} of 14 samples without curvature, features over {2 * scale} decades"
        + ("" if curved else ", and an empty part of the loss"),
        curved_make, truth=formula_truth(masked_formula(curved)))  # fmt: skip
for key, title, factor in [
    ("small_e6", "curvature × 1e-6 at 11 of 14 samples", 1e-6),
    ("small_e12", "curvature × 1e-12 at 11 of 14 samples", 1e-12),
]:

    def small_make(factor=factor):
        x = torch.randn(14, 4).double()

        def loss(o, t):
            factors = torch.full_like(o, factor)
            factors[:3] = 1
            return (factors * o.square() / 2).mean()

        return nn.Sequential(nn.Linear(4, 1)).double(), loss, (x, torch.zeros(14, 1).double())

    small(f"curvature_{key}", title, small_make, truth=formula_truth(masked_formula(3, factor)))
for exponent in (-200, -30, 30):
    small(f"scaled_{exponent}", f"loss × 1e{exponent}",
        lambda e=exponent: (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)),
            scaled_loss(10.0**e, CE), classes()), truth=lambda m, f, b, o: Truth(double(m), CE, b))  # fmt: skip


def nearly_shift(m, x):
    return m.net(x) + m.shift(x) * (1 + 1e-3 * torch.arange(3.0).to(x))


small("nearly_shift", "logits shifted alike to a thousandth",
    lambda: (Net(nearly_shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1)).double(), CE,
        (torch.randn(14, 4).double(), torch.randint(0, 3, (14,)))), layer="shift")  # fmt: skip


def batch_norm_formula(mp, own, rows):
    """One output, batch normalization with ε = 1e-3, sine."""
    z = (rows @ own["0.weight"].T)[:, 0]
    mean = sum(z) / len(z)
    variance = sum((one - mean) ** 2 for one in z) / len(z)
    scale = 1 / mp.sqrt(variance + mp.mpf(1e-3))
    return sum(mp.sin((one - mean) * scale + number) for number, one in enumerate(z)) / len(z)


def sine_loss(output, target):
    return (output + torch.arange(len(output)).to(output)[:, None]).sin().mean()


def one_output(inputs, factor=1.0):
    model = nn.Sequential(nn.Linear(inputs, 1, bias=False), nn.BatchNorm1d(1, eps=1e-3, affine=False)).double()
    return model, sine_loss, (factor * torch.randn(9, inputs).double(), torch.zeros(9, 1).double())


for inputs, title in [(1, "one weight before batch normalization with ε = 1e-3"), (3, "three weights before it")]:
    small(f"norm_epsilon_{inputs}", title, functools.partial(one_output, inputs),
        truth=formula_truth(batch_norm_formula))  # fmt: skip
elementwise(small, "confident", "cross-entropy of one logit between 10 and 30", F.softplus,
    lambda mp, z: mp.log1p(mp.exp(z)), lambda: -10 - 20 * torch.rand(12, 1), weight=[1.0])  # fmt: skip
elementwise(small, "tiny_features", "features × 1e-8", torch.square, lambda mp, z: z * z,
    lambda: 1e-8 * torch.randn(12, 3))  # fmt: skip


def net_shift():
    return Net(shift, net=nn.Linear(4, 3), shift=nn.Linear(4, 1))


zero("softmax_shift_float32", "a layer that shifts all logits alike, in float32", net_shift,
    options={"dtype": None, "layers": ["shift"]}, levels=("unit", "layer"))  # fmt: skip
zero("softmax_shift_adam", "a layer that shifts all logits alike, in coordinates of Adam", net_shift,
    options=named(stepped("Adam", ["*"]), layers=["shift"]))  # fmt: skip
zero("softmax_shift_products", "nothing but a shift of 50 logits, 12 products",
    lambda: Net(lambda m, x: m.shift(x) + x[:, :3], shift=nn.Linear(30, 1)),
    data=lambda: classes(14, 30, 3), levels=("network",), options={"products": 12})  # fmt: skip
zero("softmax_shift_large", "a shift of logits between ±300",
    lambda: Net(lambda m, x: 300 * m.net(x) + 30 * m.shift(x), net=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    options={"layers": ["shift"]})  # fmt: skip
zero("thousand_classes", "a shift of 300 logits",
    lambda: Net(lambda m, x: torch.linspace(-1, 1, 300).to(x) + m.shift(x), shift=nn.Linear(4, 1)),
    data=lambda: classes(20, 4, 300))  # fmt: skip
zero("pairwise_ranking", "a shift of all scores in a pairwise ranking loss",
    lambda: Net(lambda m, x: m.net(x) + m.shift(x.mean(0, keepdim=True)), net=nn.Linear(4, 1),
        shift=nn.Linear(4, 1)), lambda o, t: F.softplus(o - o.T).mean(), lambda: values(8, 4, 1))  # fmt: skip
zero("contrastive_shift", "InfoNCE: a shift of all similarities of a row",
    lambda: Net(lambda m, x: F.normalize(m.a(x), dim=1) @ F.normalize(m.b(x), dim=1).T + m.shift(x),
        a=nn.Linear(4, 3), b=nn.Linear(4, 3), shift=nn.Linear(4, 1)),
    lambda o, t: F.cross_entropy(o, torch.arange(len(o))), lambda: values(8, 4, 1))  # fmt: skip
zero("instance_norm", "a bias of channels before instance normalization",
    lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.InstanceNorm2d(2), nn.Flatten(), nn.Linear(18, 3)),
    data=lambda: (torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))), layers=[], others=["0.bias"],
    layer="bias", levels=("layer",), options={"blocks": {"bias": ["0.bias"]}})  # fmt: skip
zero("group_norm_shift", "a shift of all channels before group normalization",
    lambda: Net(lambda m, x: m.out(m.norm(m.own(x) + m.shift(x))), own=nn.Linear(4, 4),
        shift=nn.Linear(4, 1), norm=nn.GroupNorm(1, 4), out=nn.Linear(4, 3)))  # fmt: skip
zero("difference_of_twins", "a layer times zero: f(z) − f(z) by two orders of a sum",
    lambda: Net(lambda m, x: m.net(x) + twin_sum(m.part(x)), net=nn.Linear(4, 3), part=nn.Linear(4, 3)),
    layers=["part"])  # fmt: skip
zero("average_of_logits", "logits minus their mean: a shift again",
    lambda: Net(lambda m, x: (m.net(x) + m.shift(x)) - (m.net(x) + m.shift(x)).mean(1, keepdim=True),
        net=nn.Linear(4, 3), shift=nn.Linear(4, 1)))  # fmt: skip
zero("zero_part_of_units", "softmax shift by one of two output units",
    lambda: Net(lambda m, x: x[:, :3] + m.two(x)[:, :1] + 0 * m.two(x)[:, 1:], two=nn.Linear(4, 2)),
    layers=["two"])  # fmt: skip


def twin_sum(z):
    f = z.exp()
    return (f[:, :1] + f[:, 1:2] + f[:, 2:]) - (f[:, 2:] + (f[:, 1:2] + f[:, :1]))


for power in (1, 3, 5):
    row(f"norm_epsilon_e{power}",
        f"one weight on inputs of 1e{power} before batch normalization with ε = 1e-3",
        functools.partial(one_output, 1, 10.0**power),
        truth=formula_truth(batch_norm_formula, terms=20.0))  # fmt: skip
