"""Second derivatives that are not finite: layers behind are measured; operation and sample are named."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import CaptureError, HesscondError, NotFiniteError
from tests.catalogue.parts import Net
from tests.catalogue.wrong_backward import function
from tests.truth import layer_truth

SAMPLES, ZEROS = 6, 2
LOSS = nn.MSELoss()


def where(a, values):
    return torch.where(a == 0, torch.ones_like(a), values)


#: By name, an operation that is smooth where its argument is zero, or constant in the weights, and its name in torch.
OPERATIONS = {
    "norm": (lambda a: a * a.norm(dim=1, keepdim=True), "torch.linalg.vector_norm"),
    "norm squared": (lambda a: a * a.norm(dim=1, keepdim=True) ** 2, "torch.linalg.vector_norm"),
    "normalize": (lambda a: F.normalize(a, dim=1, eps=1e-3) * a, "torch.linalg.vector_norm"),
    "cosine similarity": (
        lambda a: a * F.cosine_similarity(a, torch.ones_like(a), dim=1)[:, None],
        "torch.linalg.vector_norm",
    ),
    "sinc": (torch.sinc, "torch.sinc"),
    "sin x / x within where": (lambda a: where(a, torch.sin(a) / a), "torch.div"),
    "expm1 x / x within where": (lambda a: where(a, torch.expm1(a) / a), "torch.div"),
    "root of a square": (lambda a: torch.sqrt(a**2) * a, "torch.sqrt"),
    "power one half": (lambda a: a * (a**2) ** 0.5, "torch.pow"),
    "power three halves": (lambda a: a * a.square().sum(1, keepdim=True) ** 1.5, "torch.pow"),
    "reciprocal root within where": (lambda a: torch.where(a == 0, a, a * torch.rsqrt(a.abs())), "torch.rsqrt"),
    "deviation of a constant": (lambda a: a * a.std(1, keepdim=True), "torch.std"),
    "root of the variance": (lambda a: a / (a.var(1, keepdim=True).sqrt() + 1e-5), "torch.sqrt"),
    "x log x": (lambda a: torch.xlogy(a**2, a**2), "torch.xlogy"),
    "entropy": (lambda a: torch.special.entr(a**2), "torch.special.entr"),
    "logarithm within where": (lambda a: torch.where(a == 0, a, torch.log(a.abs())), "torch.log"),
    "angle within where": (lambda a: torch.where(a == 0, a, torch.atan2(a, a.roll(1, 1))), "torch.atan2"),
    "hypotenuse": (lambda a: a * torch.hypot(a, a.roll(1, 1)), "torch.hypot"),
    "arc cosine of one": (lambda a: torch.acos(torch.exp(-(a**2))), "torch.acos"),
    "area cosine of one": (lambda a: torch.acosh(1 + a**2), "torch.acosh"),
    "length": (lambda a: a * (a**2).sum(1, keepdim=True).sqrt(), "torch.sqrt"),
}


def batch_of(seed=0, good=False):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 2, generator=generator)
    x[ZEROS] = 0
    kept = torch.arange(SAMPLES) != ZEROS
    return (x[kept], y[kept]) if good else (x, y)


def made(operation):
    """A layer without bias, which maps a sample of zeros to zeros, an operation, and a layer behind it."""
    torch.manual_seed(1)
    parts = {"before": nn.Linear(4, 5, bias=False), "behind": nn.Linear(5, 2)}
    return Net(lambda m, x: m.behind(operation(m.before(x))), **parts)


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_layer_behind_is_measured_and_the_operation_in_front_is_named(name, level):
    operation, words = OPERATIONS[name]
    model, batch = made(operation), batch_of()
    result = hesscond.probe(model, LOSS, batch, level=level)
    assert list(result) == ["behind"]
    truth = layer_truth(model, LOSS, batch, "behind")
    found = result["behind"].hessian(*([1] if level == "unit" else []))
    own = truth[5 + 1 :, 5 + 1 :] if level == "unit" else truth
    assert (found - own).norm() <= 1e-12 * own.norm()
    reason = result.skipped["before"]
    assert words in reason
    assert f"at sample {ZEROS};" in reason
    assert f"leave sample {ZEROS} out" in reason
    assert "test_capture_nonfinite.py" in reason


@pytest.mark.share(3)
@pytest.mark.parametrize("name", ["norm", "sinc", "x log x", "arc cosine of one"])
def test_leaving_the_sample_out_is_a_way_out(name):
    model, batch = made(OPERATIONS[name][0]), batch_of(good=True)
    result = hesscond.probe(model, LOSS, batch, level="layer")
    assert not result.skipped
    truth = layer_truth(model, LOSS, batch, "before")
    assert (result["before"].hessian() - truth).norm() <= 1e-10 * truth.norm()


def test_the_ways_out_of_roots_and_quotients():
    eps = lambda a: a * (a.square().sum(1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    in_front = lambda a: where(a, torch.sin(where(a, a)) / where(a, a))  # noqa: E731
    for operation in (eps, in_front):
        model, batch = made(operation), batch_of()
        result = hesscond.probe(model, LOSS, batch, level="layer")
        truth = layer_truth(model, LOSS, batch, "before")
        assert not result.skipped
        assert (result["before"].hessian() - truth).norm() <= 1e-10 * truth.norm()


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer", "network"])
def test_a_layer_that_was_named_is_refused(level):
    model, batch = made(OPERATIONS["norm"][0]), batch_of()
    with pytest.raises(NotFiniteError, match=r"torch.linalg.vector_norm .* at sample 2; add a small eps"):
        hesscond.probe(model, LOSS, batch, ["before", "behind"], level)
    assert list(hesscond.probe(model, LOSS, batch, ["behind"], level))
    assert "before" in hesscond.probe(model, LOSS, batch, ["b*"], "layer").skipped


def test_the_module_is_named_and_all_samples_are():
    torch.manual_seed(0)
    parts = {"left": nn.Linear(3, 4, bias=False), "right": nn.Linear(3, 4, bias=False)}
    towers = Net(lambda m, x: m.cosine(m.left(x[:, :3]), m.right(x[:, 3:])), **parts, cosine=nn.CosineSimilarity(dim=1))
    x, y = torch.randn(9, 6), torch.randn(9)
    x[[1, 4, 8], :3] = 0
    result = hesscond.probe(towers, LOSS, (x, y))
    assert list(result) == ["right"]
    assert "torch.linalg.vector_norm (module 'cosine'" in result.skipped["left"]
    assert "at samples 1, 4, 8;" in result.skipped["left"]


@pytest.mark.share(3)
@pytest.mark.parametrize(
    "loss", [lambda o, t: F.mse_loss(o[0], t) + 0.1 * o[1], lambda o, t: F.mse_loss(o[0], t) * (1 + o[1])]
)
def test_what_no_sample_is_to_blame_for_names_none(loss):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    net[0].weight.data[1] = 0
    lasso = Net(lambda m, x: (m.net(x), m.net[0].weight.norm(dim=1).sum()), net=net)
    result = hesscond.probe(lasso, loss, batch_of(), level="layer")
    assert list(result) == ["net.2"]
    assert "torch.linalg.vector_norm" in result.skipped["net.0"]
    assert "sample" not in result.skipped["net.0"]


@pytest.mark.share(3)
@pytest.mark.parametrize("layers", ["*", ["b*", "scale"], None])
def test_blocks_by_products_go_apart(layers):
    operation = OPERATIONS["norm"][0]
    parts = {"before": nn.Linear(4, 5, bias=False), "behind": nn.Linear(5, 2)}
    parts |= {"shift": nn.Parameter(torch.zeros(4)), "scale": nn.Parameter(torch.ones(2))}
    model = Net(lambda m, x: m.behind(operation(m.before(x + m.shift * x))) * m.scale, **parts)
    batch = batch_of()
    result = hesscond.probe(model, LOSS, batch, layers, "layer")
    assert {"behind"} <= set(result) <= {"behind", "scale"}
    assert {"before"} <= set(result.skipped)
    if layers == "*":
        assert "torch.linalg.vector_norm" in result.skipped["shift"]
    if layers is not None:
        wide = {key: value.double() for key, value in model.state_dict().items()}
        x, y = (part.double() for part in batch)
        truth = torch.func.hessian(
            lambda scale: F.mse_loss(torch.func.functional_call(model, wide | {"scale": scale}, (x,)), y)
        )(wide["scale"])
        assert (result["scale"].hessian() - truth).norm() <= 1e-12 * truth.norm()
    with pytest.raises(CaptureError, match=r"'shift' cannot be probed: .*torch.linalg.vector_norm"):
        hesscond.probe(model, LOSS, batch, ["scale", "shift"], "layer")


#: The identity, whose derivative is NaN; p q, whose mixed second derivative comes out as NaN.
lost = function(torch.clone, lambda g, k: g * math.nan)
mixed = function(torch.mul, lambda g, k, p, q: (g * lost(q), g * lost(p)), saved=lambda p, q, y: (p, q))


def test_blocks_that_are_right_alone_and_not_together():
    torch.manual_seed(3)
    parts = {"p": nn.Parameter(torch.rand(3)), "q": nn.Parameter(torch.rand(3))}
    model, (x, _) = Net(lambda m, x: x[:, :3] * mixed(m.p, m.q), **parts), batch_of()
    y = torch.randn(SAMPLES, 3)
    result = hesscond.probe(model, LOSS, (x, y), ["p", "q"], "layer")
    for name, other in (("p", model.q), ("q", model.p)):
        truth = 2 * (x[:, :3].double().square().mean(0) / 3 * other.detach().double() ** 2).diag()
        assert (result[name].hessian() - truth).norm() <= 1e-12 * truth.norm()
    with pytest.raises(NotFiniteError, match="derivative of Own"):
        hesscond.probe(model, LOSS, (x, y), ["p", "q"], "network")


@pytest.mark.share(3)
@pytest.mark.parametrize("level", ["unit", "layer"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stream_with_one_bad_batch(level, place):
    model, (x, y) = made(OPERATIONS["sinc"][0]), batch_of()
    order = torch.roll(torch.arange(SAMPLES), 2 * place)
    stream = [(x[rows], y[rows]) for rows in order.split(2)]
    result = hesscond.probe(model, LOSS, stream, level=level)
    assert list(result) == ["behind"]
    assert "torch.sinc" in result.skipped["before"]
    truth = layer_truth(model, LOSS, (x, y), "behind")
    found = result["behind"].hessian(*([1] if level == "unit" else []))
    own = truth[6:, 6:] if level == "unit" else truth
    assert (found - own).norm() <= 1e-12 * own.norm()
    with pytest.raises(HesscondError, match=r"torch.sinc"):
        hesscond.probe(model, LOSS, stream, ["before"], level)


def test_convolutions_and_tokens():
    def pooled(m, x):
        h = m.first(x)
        return m.second(h * h.square().sum((1, 2, 3), keepdim=True).sqrt()).flatten(1)

    def sequence(m, tokens):
        h = m.first(m.embedding(tokens))
        return m.second(F.normalize(h, dim=-1, eps=1e-2) * h).mean(1)

    torch.manual_seed(4)
    layers = {"first": nn.Linear(4, 5, bias=False), "second": nn.Linear(5, 3)}
    sequential = Net(sequence, embedding=nn.Embedding(7, 4, padding_idx=0), **layers)
    convolutional = Net(pooled, first=nn.Conv2d(1, 3, 3, bias=False), second=nn.Conv2d(3, 2, 2))
    pictures, tokens = torch.randn(4, 1, 5, 5), torch.randint(1, 7, (5, 6))
    pictures[3], tokens[1, 4:], tokens[4, 5:] = 0, 0, 0
    for model, x, words in ((convolutional, pictures, "sample 3"), (sequential, tokens, "samples 1, 4")):
        y = torch.randint(0, 3, (len(x),))
        for level in ("unit", "layer"):
            result = hesscond.probe(model, nn.CrossEntropyLoss(), (x, y), level=level)
            assert list(result) == ["second"]
            assert f"at {words};" in result.skipped["first"]
