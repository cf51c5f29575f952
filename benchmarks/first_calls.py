"""First calls on models of public libraries: ``python benchmarks/first_calls.py [LIBRARY…]``.

Every case is a model, a loss and a batch as their authors' examples have them, in float32, with random weights: nothing
is downloaded, and no code is copied. It gets one call, ``hesscond.probe(model, loss, batch)``. Each Hessian of the
answer is then compared, along a random vector, with a double backward on a copy of the model in float64 that shares
nothing with hesscond, or with extrapolated central differences of its gradient where torch has no second derivatives.
The table is ``docs/first-calls.md``; the libraries have to be installed.
"""
# ruff: noqa: D103

import argparse
import collections
import copy
import functools
import itertools
import math
import random
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hesscond  # noqa: E402
from tests.catalogue import (  # noqa: E402
    PAGE as CATALOGUE,
    batches,
    libraries,
    parts,
)
from tests.catalogue.parts import Net  # noqa: E402
from tests.catalogue.truths import InDouble  # noqa: E402

PAGE = ROOT / "docs" / "first-calls.md"
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
#: Units of a layer that are compared.
UNITS = 6
#: Functions that make (model, loss_fn, batch), and the loss of a float64 twin where `as_called` cannot, by library and
#: title, in the order of the page.
CASES = {}


def case(library, title, *given, **named):
    """Register a function, called with these arguments, as a case; the lowest of several comes first."""

    def register(make):
        CASES[library, title] = functools.partial(make, *given, **named)
        return make

    return register


# the truth


def as_called(loss_fn, batch, model):
    """Loss of a model on a batch in float64, as a training loop computes it."""
    batch = batch if isinstance(batch, tuple) else (batch, None)
    inputs, target = tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, batch)
    if isinstance(inputs, Mapping):
        return loss_fn(model(**inputs), target)
    return loss_fn(model(*(inputs if isinstance(inputs, tuple) else (inputs,))), target)


def seeded():
    """Seed all global generators: masks of transformers are drawn by NumPy."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)


def gradients(model, loss_of, tensors, **options):
    """Gradients of the loss of a float64 model."""
    seeded()
    with InDouble(torch.float32), sdpa_kernel(SDPBackend.MATH):
        loss = loss_of(model)
    return torch.autograd.grad(loss, tensors, materialize_grads=True, **options)


def double_backward(gradient, tensors, directions):
    """H v, by differentiating the gradient along v."""
    total = sum((g * v).sum() for g, v in zip(gradient(tensors, create_graph=True), directions, strict=True))
    if not total.requires_grad:
        return [torch.zeros_like(v) for v in directions]
    return torch.autograd.grad(total, tensors, materialize_grads=True)


@torch.no_grad()
def differences(gradient, tensors, directions):
    """H v, by central differences of the gradient along v, extrapolated."""
    h = 1e-3 / max(1.0, *(float(v.abs().max()) for v in directions))
    before, stencil = [p.clone() for p in tensors], []
    for factor in (-2, -1, 1, 2, 0):
        for p, at, v in zip(tensors, before, directions, strict=True):
            p.copy_(at + factor * h * v)
        with torch.enable_grad():
            stencil.append(gradient(tensors))
    return [(8 * (c - b) - (d - a)) / (12 * h) for a, b, c, d, _ in zip(*stencil, strict=True)]


def difference(block, unit, parameters, product, gradient):
    """Relative difference of H v of a block to a product of the truth."""
    H, entries = block.hessian(unit), block.entries(unit)
    v = torch.randn(len(H), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    places = list(zip(entries["parameter"], entries["index"], strict=True))
    vectors = {name: torch.zeros_like(parameters[name]) for name, _ in places}
    for (name, index), entry in zip(places, v.tolist(), strict=True):
        vectors[name][index] = entry
    products = product(gradient, [parameters[name] for name in vectors], list(vectors.values()))
    by_name = dict(zip(vectors, products, strict=True))
    theirs = torch.stack([by_name[name].detach()[index] for name, index in places])
    return float((H @ v - theirs).norm()) / (float(theirs.norm()) or 1.0)


# graph networks


def nodes(m, x, edge_index):
    """Outputs of two graph layers."""
    return m.second(torch.tanh(m.first(x, edge_index)), edge_index)


def pooled(m, data):
    """Mean of `nodes` over each graph of a batch."""
    from torch_geometric.nn import global_mean_pool

    return global_mean_pool(nodes(m, data.x, data.edge_index), data.batch)


@case("torch_geometric", "GCNConv, loss over train_mask, the batch is the graph")
def gcn():
    from torch_geometric.nn import GCNConv

    (data,) = batches.graphs(9)
    data.train_mask = torch.arange(9) < 6
    loss = lambda out, d: CE(out[d.train_mask], d.y[d.train_mask])  # noqa: E731
    model = Net(lambda m, d: nodes(m, d.x, d.edge_index), first=GCNConv(3, 4), second=GCNConv(4, 2))
    return model, loss, (data, data), lambda m: loss(m(batches.in_double(data)), data)


@case("torch_geometric", "GINConv, its DataLoader as the stream", loader=True)
@case("torch_geometric", "GATConv, DataBatch as the batch", loader=False)
def of_graphs(loader):
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GATConv, GINConv

    graphs = batches.graphs(4, 5, 6, 4, 5, 6, each=True)
    whole = Batch.from_data_list(graphs)
    if loader:
        layers, data = [GINConv(mlp(3, 4, 4), train_eps=True), GINConv(mlp(4, 4, 2))], DataLoader(graphs, batch_size=4)
    else:
        layers, data = [GATConv(3, 2, heads=2), GATConv(4, 2, heads=1)], whole
    model = Net(pooled, first=layers[0], second=layers[1])
    return model, CE, data, lambda m: CE(m(batches.in_double(whole)), whole.y)


@case("torch_geometric", "SAGEConv, x and edge_index by name")
def sage():
    from torch_geometric.nn import SAGEConv

    inputs = {"x": torch.randn(9, 3), "edge_index": torch.randint(0, 9, (2, 24))}
    return Net(nodes, first=SAGEConv(3, 4), second=SAGEConv(4, 2)), CE, (inputs, torch.randint(0, 2, (9,)))


# equivariance and splines


@case("e3nn", "FullyConnectedTensorProduct")
def e3nn_product():
    from e3nn import o3

    product = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
    model = Net(lambda m, x, y: m.out(m.product(x, y)), product=product, out=o3.Linear("2x0e + 1x1o", "1x0e"))
    return model, MSE, ((torch.randn(8, 5), torch.randn(8, 4)), torch.randn(8, 1))


@case("e3nn", "Gate between two o3.Linear")
def e3nn_gate():
    from e3nn import nn as enn, o3

    gate = enn.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
    model = nn.Sequential(o3.Linear("2x0e + 1x1o", gate.irreps_in), gate, o3.Linear(gate.irreps_out, "1x0e"))
    return model, MSE, (torch.randn(8, 5), torch.randn(8, 1))


@case("pykan", "KAN [3, 4, 4, 2], cross-entropy", 3, 4, 4, 2, classes=True)
@case("pykan", "KAN [4, 5, 3], speed()", 4, 5, 3, speed=True)
@case("pykan", "KAN [2, 3, 1]", 2, 3, 1)
def kan(*width, speed=False, classes=False):
    from kan import KAN

    model = KAN(width=list(width), grid=3, k=3, seed=0, device="cpu", auto_save=False)
    if speed:
        model.speed()
    x, y = torch.rand(20, width[0]) * 2 - 1, torch.randn(20, width[-1])
    return (model, CE, (x, torch.randint(0, 2, (20,)))) if classes else (model, MSE, (x, y))


# Gaussian processes


def gaussian(m, x):
    """Normal distribution of a Gaussian process at inputs."""
    import gpytorch

    h = m.features(x)
    return gpytorch.distributions.MultivariateNormal(m.mean(h), m.kernel(h))


def process(base, *given, features=None, dimensions=None):
    """Gaussian process of a class of gpytorch."""
    import gpytorch

    model = type("GP", (base,), {"forward": gaussian})(*given)
    model.mean, model.features = gpytorch.means.ConstantMean(), features or nn.Identity()
    model.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=dimensions))
    return model


@case("gpytorch", "deep kernel (an MLP in an ExactGP)", deep=True)
@case("gpytorch", "ExactGP, marginal likelihood", deep=False)
def exact_gp(deep):
    import gpytorch

    x = torch.linspace(0, 1, 12)
    y = torch.sin(6 * x) + 0.1 * torch.randn(12)
    x = torch.stack([x, x.cos()], 1) if deep else x
    facts = {"features": mlp(2, 4, 2) if deep else None, "dimensions": 1 + deep}
    model = process(gpytorch.models.ExactGP, x, y, gpytorch.likelihoods.GaussianLikelihood(), **facts)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def truth(m):
        m.set_train_data(x.double(), y.double(), strict=False)
        return -gpytorch.mlls.ExactMarginalLogLikelihood(m.likelihood, m)(m(x.double()), y.double())

    return model, lambda out, target: -mll(out, target), (x, y), truth


@case("gpytorch", "SVGP, variational ELBO")
def gp_variational():
    import gpytorch
    from gpytorch import variational

    x = torch.linspace(0, 1, 12)[:, None]
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(12)

    class Variational(gpytorch.models.ApproximateGP):
        def __init__(self, points):
            distribution = variational.CholeskyVariationalDistribution(points.size(0))
            super().__init__(variational.VariationalStrategy(self, points, distribution, True))

    model, likelihood = (
        process(Variational, torch.linspace(0, 1, 4)[:, None]),
        gpytorch.likelihoods.GaussianLikelihood(),
    )
    with torch.no_grad():
        model(x)  # initializes the variational distribution
    twin, elbo = copy.deepcopy(likelihood).double(), functools.partial(gpytorch.mlls.VariationalELBO, num_data=12)
    mll = elbo(likelihood, model)
    return model, lambda out, target: -mll(out, target), (x, y), lambda m: -elbo(twin, m)(m(x.double()), y.double())


# transformers and diffusers

TINY = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": 7, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
own_loss, ids = libraries.own_loss, libraries.sentences


def trained(model, **batch):
    """Model in training mode with a loss of its own."""
    return model.train(), own_loss, batch


@case("transformers", "BERT classifier in training mode, the batch with labels, loss None")
def bert_none():
    model, _, (inputs, labels) = libraries.bert()
    batch = {**inputs, "labels": labels}
    return model.train(), None, batch, lambda m: m(**batch).loss


@case("transformers", "GPT-2 in training mode (dropout), own loss")
def gpt2():
    return trained(libraries.tiny_gpt2(), input_ids=(tokens := ids()), labels=tokens)


@case("transformers", "T5 in training mode, own loss")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    return trained(T5ForConditionalGeneration(config), input_ids=ids(), labels=ids(4, 3))


@case("transformers", "CLIP, contrastive loss of its own")
def clip():
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(**TINY, **TOKENS, max_position_embeddings=4, projection_dim=3)
    vision = CLIPVisionConfig(**TINY, image_size=4, patch_size=2, projection_dim=3)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=3))
    return trained(model, input_ids=ids(), pixel_values=torch.randn(4, 3, 4, 4), return_loss=True)


@case("transformers", "Wav2Vec2 in evaluation mode", training=False)
@case("transformers", "Wav2Vec2 in training mode (dropout, LayerDrop, masked spans)", training=True)
def wav2vec2(training):
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        **TINY, vocab_size=7, conv_dim=(4, 4), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=4, num_labels=2,
        mask_time_prob=0.3, mask_time_length=2,
    )  # fmt: skip
    model, x = Wav2Vec2ForSequenceClassification(config).train(training), torch.randn(3, 160)
    return model, own_loss, {"input_values": x, "labels": torch.tensor([0, 1, 1])}


@case("transformers", "Mamba, own loss")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=7, hidden_size=4, state_size=2, num_hidden_layers=1, expand=1, time_step_rank=2)
    return trained(MambaForCausalLM(config), input_ids=(tokens := ids()), labels=tokens)


def sample_loss(out, target):
    return MSE(out.sample, target)


@case("diffusers", "UNet2DModel, noise prediction")
def unet():
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 8), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 1, 8, 8), "timestep": torch.tensor([3, 50])}
    return model, sample_loss, (inputs, torch.randn(2, 1, 8, 8))


@case("diffusers", "AutoencoderKL, reconstruction")
def vae_kl():
    from diffusers import AutoencoderKL

    size = {"in_channels": 1, "out_channels": 1, "block_out_channels": (4,), "latent_channels": 2, "sample_size": 4}
    x = torch.randn(2, 1, 4, 4)
    return AutoencoderKL(**size, norm_num_groups=2), sample_loss, (x, x)


# dictionaries of tensors


@case("tensordict", "ProbabilisticTensorDictModule's log-probability")
def tensordict_actor():
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Categorical

    model = ProbabilisticTensorDictSequential(
        TensorDictModule(mlp(3, 4, 2), ["x"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    batch = TensorDict({"x": torch.randn(8, 3), "y": torch.rand(8)}, batch_size=[8])
    loss = lambda out, data: (out["logits"].log_softmax(-1)[:, 0] * data["y"]).mean()  # noqa: E731
    return model, loss, (batch, batch), lambda m: loss(m(batch.clone().double()), batch.double())


# flows and equations


def likelihood(distribution, x):
    return -distribution.log_prob(x).mean()


@case("zuko", "NSF, unconditional: the input is None")
def nsf():
    import zuko

    model, x = zuko.flows.NSF(2, 0, transforms=1, bins=3, hidden_features=[4]), torch.randn(8, 2)
    return model, likelihood, (None, x), lambda m: likelihood(m(), x.double())


@case("zuko", "MAF, conditional")
def maf():
    import zuko

    model, c, x = zuko.flows.MAF(2, 1, transforms=2, hidden_features=[4]), torch.randn(8, 1), torch.randn(8, 2)
    return model, likelihood, (c, x)


@case("torchdiffeq", "odeint_adjoint, rk4", "odeint_adjoint", 3, method="rk4", options={"step_size": 0.5})
@case("torchdiffeq", "odeint, dopri5", "odeint", 4)
def neural_ode(solver, width, **options):
    import torchdiffeq

    def forward(m, x):
        times = torch.tensor([0.0, 1.0], dtype=x.dtype)
        return m.head(getattr(torchdiffeq, solver)(m.field, x, times, **options)[-1])

    field = Net(lambda m, t, y: m.net(y), net=mlp(2, width, 2))
    return Net(forward, field=field, head=nn.Linear(2, 2)), CE, (torch.randn(8, 2), torch.arange(8) % 2)


@case("normflows", "RealNVP, the loss is a method of the model")
def realnvp():
    import normflows

    flows = []
    for _ in range(2):
        net = normflows.nets.MLP([1, 4, 2], init_zeros=False)
        flows += [normflows.flows.AffineCouplingBlock(net), normflows.flows.Permute(2, mode="swap")]
    model = normflows.NormalizingFlow(normflows.distributions.base.DiagGaussian(2), flows)
    x = torch.randn(8, 2)
    return model, lambda out, x: model.forward_kld(x), (x, x), lambda m: m.forward_kld(x.double())


# by structure, torch alone


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*layers[:-1])


@case("torch", "SIREN, gradients and values supervised")
def siren():
    def forward(m, x):
        x = x.clone().requires_grad_()
        return torch.cat([y := m.net(x), torch.autograd.grad(y.sum(), x, create_graph=True)[0]], 1)

    model = Net(forward, net=mlp(2, 6, 6, 1, act=lambda: parts.Applied(lambda x: torch.sin(30 * x))))
    with torch.no_grad():
        for p in model.parameters():
            p /= 10
    return model, MSE, (torch.rand(10, 2), torch.randn(10, 3))


@case("torch", "DeepONet: branch and trunk, root bias")
def deeponet():
    def forward(m, u, y):
        return torch.einsum("bp,np->bn", m.branch(u), m.trunk(y)) + m.bias

    model = Net(forward, branch=mlp(4, 5, 3), trunk=mlp(1, 5, 3), bias=nn.Parameter(torch.zeros(1)))
    return model, MSE, ((torch.randn(6, 4), torch.rand(7, 1)), torch.randn(6, 7))


@case("torch", "FNO: spectral layer with complex weights")
def fno():
    def forward(m, x):
        h = m.lift(x).mT
        low = torch.einsum("bim,iom->bom", torch.fft.rfft(h)[..., :4], m.spectral)
        return m.out(F.gelu(torch.fft.irfft(low, n=h.shape[-1]) + m.skip(h)).mT)

    layers = {"lift": nn.Linear(1, 3), "skip": nn.Conv1d(3, 3, 1), "out": nn.Linear(3, 1)}
    model = Net(forward, **layers, spectral=nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cfloat) / 3))
    return model, MSE, (torch.randn(4, 12, 1), torch.randn(4, 12, 1))


@case("torch", "triplet margin loss, three inputs")
def triplet():
    model = Net(lambda m, *inputs: tuple(map(m.net, inputs)), net=mlp(4, 5, 3))
    return model, lambda out, _: F.triplet_margin_loss(*out), (tuple(torch.randn(3, 8, 4)), None)


@case("torch", "ArcFace: W in the loss")
def arcface():
    def margin(m, h, y):
        cos = (F.normalize(h) @ F.normalize(m.W).mT).clamp(-1 + 1e-6, 1 - 1e-6)
        return CE(5 * torch.where(F.one_hot(y, 4).bool(), (cos.acos() + 0.3).cos(), cos), y)

    loss = Net(margin, W=nn.Parameter(torch.randn(4, 3)))
    twin = copy.deepcopy(loss).double()
    x, y = torch.randn(10, 4), torch.arange(10) % 4
    return mlp(4, 5, 3), loss, (x, y), lambda m: twin(m(x.double()), y)


@case("torch", "CTC over a GRU")
def ctc():
    def forward(m, x):
        return m.out(m.rnn(x)[0]).log_softmax(-1).transpose(0, 1)

    lengths = torch.full((3,), 8), torch.full((3,), 3)
    loss = lambda out, y: F.ctc_loss(out, y, *lengths)  # noqa: E731
    model = Net(forward, rnn=nn.GRU(3, 4, batch_first=True), out=nn.Linear(4, 5))
    return model, loss, (torch.randn(3, 8, 3), torch.randint(1, 5, (3, 3)))


@case("torch", "Chebyshev KAN (einsum over polynomials), no layer of torch")
def chebyshev():
    def forward(m, x):
        polynomials = [torch.cos(k * torch.tanh(x).acos()) for k in range(4)]
        return torch.einsum("bid,iod->bo", torch.stack(polynomials, -1), m.coefficients)

    layers = [Net(forward, coefficients=nn.Parameter(torch.randn(i, o, 4) / i)) for i, o in ((3, 4), (4, 2))]
    return nn.Sequential(*layers), CE, (torch.randn(12, 3), torch.arange(12) % 2)


#: Kinds of the support table, whose models are those of the tests.
NAMES = """geometric geometric_loader tensor_dict pinn gradient_penalty all_against_all siamese mixture_of_experts vae
    detection list_of_records kink_quantile embedding_bag loose packed bert vit llama"""
KINDS = [kind for kind in CATALOGUE if kind.name in NAMES.split()]
SHARED = {(kind.library or "torch", kind.title): kind for kind in KINDS}
CASES |= {key: kind.build for key, kind in SHARED.items()}
#: Where only differences of gradients are the truth.
DIFFERENCES = ("odeint_adjoint, rk4", "CTC over a GRU")

INTRODUCTION = """\
# First calls

One call, `hesscond.probe(model, loss, batch)`, on models and losses that people write: tiny,
in float32, with random weights. Each Hessian of the answer was compared, along a random vector, with a double
backward on a copy of the model in float64 that shares nothing with hesscond; *differences*: with extrapolated
differences of its gradient, where torch's second derivatives are missing or wrong; hesscond then uses
differences too, whose error is in the interval of κ (`odeint_adjoint`). `skipped` of the results names
the rest with the way to measure it. Written by `benchmarks/first_calls.py`.

| library | model | Hessians | skipped | difference |
|---|---|---|---|---|
"""


def tried(library, title):
    """Row of the table for a case."""
    torch.manual_seed(0)
    model, loss, batch, *losses = CASES[library, title]()
    twin = SHARED[library, title].twin(model) if (library, title) in SHARED else parts.double(model)
    for p in twin.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    gradient = functools.partial(gradients, twin, losses[0] if losses else functools.partial(as_called, loss, batch))
    seeded()
    try:
        result = hesscond.probe(model, loss, batch)
    except hesscond.HesscondError as error:
        return f"| {library} | {title} | refused: {error} | | |"
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    worst, by_differences = 0.0, title in DIFFERENCES
    for block in result.values():
        for unit in list(block.blocks)[:UNITS]:
            off = math.inf if title in DIFFERENCES else difference(block, unit, parameters, double_backward, gradient)
            if off > 1e-8 and (other := difference(block, unit, parameters, differences, gradient)) < off:
                off, by_differences = other, True
            worst = max(worst, off)
    count = f"{sum(len(block.conditions) for block in result.values())} in {len(result)} blocks"
    names = collections.Counter(re.split(" with |: |, ", reason)[0] for reason in result.skipped.values())
    skipped = ", ".join(f"{number} {name}" if number > 1 else name for name, number in names.items())
    skipped = skipped.replace("|", "\\|") or "nothing"
    way = " (differences)" if by_differences else ""
    return f"| {library} | {title} | {count} | {skipped} | {max(worst, 1e-15):.0e}{way} |"


def main():
    """Try the cases of the libraries that are named, or all, and put their rows in place of those of the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", nargs="*")
    chosen = parser.parse_args().libraries
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = {line.split(" | ")[1]: line for line in lines if line.startswith("| ")}
    for library, title in CASES:
        if chosen and library not in chosen:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[title] = tried(library, title)
        print(rows[title], flush=True)
        known = [rows[title] for _, title in CASES if title in rows]
        PAGE.write_text(INTRODUCTION + "\n".join(known) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
