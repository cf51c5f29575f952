"""First calls on models of public libraries: ``python benchmarks/first_calls.py [NAME…]``.

Every case is a model, a loss and a batch as their authors' examples have them, in float32, with random weights: nothing
is downloaded, and no code is copied. It gets one call, ``hesscond.probe(model, loss, batch)``. Each Hessian of the
answer is then compared, along a random vector, with a double backward on a copy of the model in float64 that shares
nothing with hesscond, or with extrapolated central differences of its gradient where torch has no second derivatives.
The table is ``docs/first-calls.md``; the libraries have to be installed.
"""
# ruff: noqa: D101, D103

import argparse
import collections
import copy
import dataclasses
import functools
import itertools
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence, pack_sequence

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import hesscond  # noqa: E402
from tests.support.truth import InDouble  # noqa: E402

PAGE = ROOT / "docs" / "first-calls.md"
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
#: Units of a layer and vectors that are compared.
UNITS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A first call.

    Attributes
    ----------
    library, title
        What the table says.
    make
        Makes (model, loss_fn, batch), and the loss of a float64 copy of the model where `as_called` cannot compute it.
    differences
        Whether the truth is differences of gradients.
    """

    library: str
    title: str
    make: Callable[[], tuple[Any, ...]]
    differences: bool = False

    @property
    def name(self):
        return self.make.__name__


CASES: list[Case] = []


def case(library, title, **facts):
    """Register a function that makes a case."""

    def register(make):
        CASES.append(Case(library, title, make, **facts))
        return make

    return register


# ----------------------------------------------------------------------------------------------------------- the truth


def doubled(value):
    """Batch with its floating-point tensors in float64."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, PackedSequence):
        return value.double()
    if hasattr(value, "apply") and not isinstance(value, Mapping):
        return copy.copy(value).apply(doubled)
    if isinstance(value, Mapping):
        return {key: doubled(one) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(doubled, value))
    return type(value)(map(doubled, value)) if isinstance(value, (tuple, list)) else value


def as_called(loss_fn, batch, model):
    """Loss of a model on a batch in float64, as a training loop computes it."""
    inputs, target = doubled(batch) if isinstance(batch, tuple) else (doubled(batch), None)
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
    if isinstance(inputs, tuple) and not hasattr(inputs, "_fields"):
        args = inputs
    return loss_fn(model(*args, **kwargs), target)


def seeded(seed):
    """Seed all global generators: masks of transformers are drawn by NumPy."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


class Truth:
    """Products with the Hessian of the loss of a float64 copy of a model."""

    def __init__(self, model, loss_of, *, differences, seed):
        self.model, self.loss_of, self.seed, self.differences = model, loss_of, seed, differences
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def loss(self):
        seeded(self.seed)
        with InDouble(torch.float32), sdpa_kernel(SDPBackend.MATH):
            return self.loss_of(self.model)

    def product(self, vectors):
        """H v in the parameters that ``vectors`` name."""
        tensors = [self.parameters[name] for name in vectors]
        directions = list(vectors.values())
        if self.differences:
            return dict(zip(vectors, self.extrapolated(tensors, directions), strict=True))
        gradients = torch.autograd.grad(self.loss(), tensors, create_graph=True, materialize_grads=True)
        total = sum((g * v).sum() for g, v in zip(gradients, directions, strict=True))
        if not total.requires_grad:
            return {name: torch.zeros_like(v) for name, v in vectors.items()}
        return dict(zip(vectors, torch.autograd.grad(total, tensors, materialize_grads=True), strict=True))

    def extrapolated(self, tensors, directions):
        coarse, fine = (self.central(tensors, directions, step) for step in (2e-3, 1e-3))
        return [(4 * f - c) / 3 for f, c in zip(fine, coarse, strict=True)]

    def central(self, tensors, directions, step):
        step /= max(1.0, max(float(v.abs().max()) for v in directions))
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                for p, v in zip(tensors, directions, strict=True):
                    p += sign * step * v
            found.append(
                [g.detach().clone() for g in torch.autograd.grad(self.loss(), tensors, materialize_grads=True)]
            )
            with torch.no_grad():
                for p, v in zip(tensors, directions, strict=True):
                    p -= sign * step * v
        return [(up - down) / (2 * step) for up, down in zip(*found, strict=True)]


def difference(block, unit, truth):
    """Relative difference of H v of a block to the truth."""
    H, entries = block.hessian(unit), block.entries(unit)
    v = torch.randn(len(H), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    places = list(zip(entries["parameter"], entries["index"], strict=True))
    vectors = {name: torch.zeros_like(truth.parameters[name]) for name, _ in places}
    for (name, index), entry in zip(places, v.tolist(), strict=True):
        vectors[name][index] = entry
    product = truth.product(vectors)
    theirs = torch.stack([product[name].detach()[index] for name, index in places])
    scale = float(theirs.norm())
    found = float((H @ v - theirs).norm())
    return found / scale if scale > 0 else found


# ------------------------------------------------------------------------------------------------------ graph networks


def molecules(count=6):
    from torch_geometric.data import Data

    graphs = []
    for i in range(count):
        n = 4 + i % 3
        graphs.append(Data(x=torch.randn(n, 3), edge_index=torch.randint(0, n, (2, 2 * n)), y=torch.tensor([i % 2])))
    return graphs


class GraphNet(nn.Module):
    """Two graph layers, and a mean over each graph if the batch has several."""

    def __init__(self, first, second, pooled):
        super().__init__()
        self.first, self.second, self.pooled = first, second, pooled

    def forward(self, data):
        from torch_geometric.nn import global_mean_pool

        h = torch.tanh(self.first(data.x, data.edge_index))
        h = self.second(h, data.edge_index)
        return global_mean_pool(h, data.batch) if self.pooled else h


def one_graph(make):
    from torch_geometric.data import Data

    data = Data(x=torch.randn(9, 3), edge_index=torch.randint(0, 9, (2, 24)), y=torch.randint(0, 2, (9,)))
    return GraphNet(make(3, 4), make(4, 2), pooled=False), CE, (data, data.y)


@case("torch_geometric", "GCNConv, one graph (Data)")
def gcn():
    from torch_geometric.nn import GCNConv

    return one_graph(GCNConv)


@case("torch_geometric", "GCNConv, loss over train_mask, the batch is the graph")
def gcn_masked():
    from torch_geometric.nn import GCNConv

    model, _, (data, _) = one_graph(GCNConv)
    data.train_mask = torch.arange(9) < 6
    return model, lambda out, d: CE(out[d.train_mask], d.y[d.train_mask]), (data, data)


@case("torch_geometric", "GATConv, DataBatch as the batch")
def gat():
    from torch_geometric.data import Batch
    from torch_geometric.nn import GATConv

    batch = Batch.from_data_list(molecules())
    model = GraphNet(GATConv(3, 2, heads=2), GATConv(4, 2, heads=1), pooled=True)
    return model, CE, batch, lambda m: CE(m(doubled(batch)), batch.y)


@case("torch_geometric", "GINConv, its DataLoader as the stream")
def gin():
    from torch_geometric.data import Batch
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GINConv

    mlp = lambda i, o: nn.Sequential(nn.Linear(i, 4), nn.Tanh(), nn.Linear(4, o))  # noqa: E731
    graphs = molecules()
    whole = Batch.from_data_list(graphs)
    model = GraphNet(GINConv(mlp(3, 4), train_eps=True), GINConv(mlp(4, 2)), pooled=True)
    return model, CE, DataLoader(graphs, batch_size=4), lambda m: CE(m(doubled(whole)), whole.y)


@case("torch_geometric", "SAGEConv, x and edge_index by name")
def sage():
    from torch_geometric.nn import SAGEConv

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = SAGEConv(3, 4), SAGEConv(4, 2)

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).relu(), edge_index)

    inputs = {"x": torch.randn(9, 3), "edge_index": torch.randint(0, 9, (2, 24))}
    return Net(), CE, (inputs, torch.randint(0, 2, (9,)))


# -------------------------------------------------------------------------------------------- equivariance and splines


@case("e3nn", "FullyConnectedTensorProduct")
def e3nn_product():
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.product = o3.FullyConnectedTensorProduct("2x0e + 1x1o", "1x0e + 1x1o", "2x0e + 1x1o")
            self.out = o3.Linear("2x0e + 1x1o", "1x0e")

        def forward(self, x, y):
            return self.out(self.product(x, y))

    return Net(), MSE, ((torch.randn(8, 5), torch.randn(8, 4)), torch.randn(8, 1))


@case("e3nn", "Gate between two o3.Linear")
def e3nn_gate():
    from e3nn import nn as enn
    from e3nn import o3

    gate = enn.Gate("2x0e", [torch.tanh], "1x0e", [torch.sigmoid], "1x1o")
    model = nn.Sequential(o3.Linear("2x0e + 1x1o", gate.irreps_in), gate, o3.Linear(gate.irreps_out, "1x0e"))
    return model, MSE, (torch.randn(8, 5), torch.randn(8, 1))


def kan(width, samples=20):
    from kan import KAN

    inputs, outputs = width[0], width[-1]
    model = KAN(width=width, grid=3, k=3, seed=0, device="cpu", auto_save=False)
    return model, MSE, (torch.rand(samples, inputs) * 2 - 1, torch.randn(samples, outputs))


@case("pykan", "KAN [2, 3, 1]")
def kan_small():
    return kan([2, 3, 1])


@case("pykan", "KAN [4, 5, 3], speed()")
def kan_wide():
    model, loss, batch = kan([4, 5, 3])
    model.speed()
    return model, loss, batch


@case("pykan", "KAN [3, 4, 4, 2], cross-entropy")
def kan_deep():
    model, _, (x, _) = kan([3, 4, 4, 2])
    return model, CE, (x, torch.randint(0, 2, (20,)))


# -------------------------------------------------------------------------------------------------- Gaussian processes


def gp_data():
    x = torch.linspace(0, 1, 12)
    return x, torch.sin(6 * x) + 0.1 * torch.randn(12)


def exact_gp(x, y, features=None, size=1):
    import gpytorch

    class GP(gpytorch.models.ExactGP):
        def __init__(self, x, y, likelihood):
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=size))
            self.features = features

        def forward(self, x):
            h = x if self.features is None else self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(h), self.kernel(h))

    model = GP(x, y, gpytorch.likelihoods.GaussianLikelihood())
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)

    def truth(m):
        own = gpytorch.mlls.ExactMarginalLogLikelihood(m.likelihood, m)
        m.set_train_data(x.double(), y.double(), strict=False)
        return -own(m(x.double()), y.double())

    return model, lambda out, target: -mll(out, target), (x, y), truth


@case("gpytorch", "ExactGP, marginal likelihood")
def gp_exact():
    return exact_gp(*gp_data())


@case("gpytorch", "deep kernel (an MLP in an ExactGP)")
def gp_deep():
    x, y = gp_data()
    return exact_gp(torch.stack([x, x.cos()], 1), y, nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)), 2)


@case("gpytorch", "SVGP, variational ELBO")
def gp_variational():
    import gpytorch

    x, y = gp_data()

    class GP(gpytorch.models.ApproximateGP):
        def __init__(self, points):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(points.size(0))
            strategy = gpytorch.variational.VariationalStrategy(
                self, points, distribution, learn_inducing_locations=True
            )
            super().__init__(strategy)
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    model, likelihood = GP(torch.linspace(0, 1, 4)[:, None]), gpytorch.likelihoods.GaussianLikelihood()
    with torch.no_grad():
        model(x[:, None])  # initializes the variational distribution
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=12)
    twin_likelihood = copy.deepcopy(likelihood).double()

    def truth(m):
        own = gpytorch.mlls.VariationalELBO(twin_likelihood, m, num_data=12)
        return -own(m(x[:, None].double()), y.double())

    return model, lambda out, target: -mll(out, target), (x[:, None], y), truth


# -------------------------------------------------------------------------------------------------------- transformers

TINY = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
TOKENS = {"vocab_size": 7, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"initializer_range": 0.5}


def ids(n=4, length=4):
    return torch.randint(3, 7, (n, length))


def own_loss(output, target):
    return output.loss


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**TINY, **WIDE, vocab_size=7, max_position_embeddings=4, num_labels=3)
    inputs = {"input_ids": ids(8), "attention_mask": torch.ones(8, 4, dtype=torch.long)}
    return BertForSequenceClassification(config), inputs, torch.arange(8) % 3


@case("transformers", "BERT classifier in training mode, the batch with labels, loss None")
def bert_none():
    model, inputs, labels = bert()
    batch = {**inputs, "labels": labels}
    return model.train(), None, batch, lambda m: m(**batch).loss


@case("transformers", "BERT classifier, logits and a loss of one's own")
def bert_logits():
    model, inputs, labels = bert()
    return model.eval(), lambda out, y: CE(out.logits, y), (inputs, labels)


@case("transformers", "GPT-2 in training mode (dropout), own loss")
def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=4, n_layer=1, n_head=2, n_positions=4, n_inner=4, use_cache=False, **TOKENS, **WIDE)
    batch = {"input_ids": (tokens := ids()), "labels": tokens}
    return GPT2LMHeadModel(config).train(), own_loss, batch, lambda m: m(**batch).loss


@case("transformers", "ViT classifier")
def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**TINY, **WIDE, image_size=4, patch_size=2, num_channels=1, num_labels=3)
    model = ViTForImageClassification(config).eval()
    return model, lambda out, y: CE(out.logits, y), ({"pixel_values": torch.randn(8, 1, 4, 4)}, torch.arange(8) % 3)


@case("transformers", "T5 in training mode, own loss")
def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=7, d_model=4, d_kv=2, d_ff=4, num_layers=1, num_heads=2, decoder_start_token_id=0)
    batch = {"input_ids": ids(), "labels": ids(4, 3)}
    return T5ForConditionalGeneration(config).train(), own_loss, batch, lambda m: m(**batch).loss


@case("transformers", "CLIP, contrastive loss of its own")
def clip():
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(**TINY, **TOKENS, max_position_embeddings=4, projection_dim=3)
    vision = CLIPVisionConfig(**TINY, image_size=4, patch_size=2, projection_dim=3)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=3))
    batch = {"input_ids": ids(), "pixel_values": torch.randn(4, 3, 4, 4), "return_loss": True}
    return model.train(), own_loss, batch, lambda m: m(**doubled(batch)).loss


def wav2vec2(**options):
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        **TINY, vocab_size=7, conv_dim=(4, 4), conv_stride=(4, 2), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, classifier_proj_size=4, num_labels=2,
        mask_time_prob=0.3, mask_time_length=2, **options,
    )  # fmt: skip
    model = Wav2Vec2ForSequenceClassification(config)
    return model, {"input_values": torch.randn(3, 160), "labels": torch.tensor([0, 1, 1])}


@case("transformers", "Wav2Vec2 in training mode (dropout, LayerDrop, masked spans)")
def wav2vec2_train():
    model, batch = wav2vec2()
    return model.train(), own_loss, batch, lambda m: m(**doubled(batch)).loss


@case("transformers", "Wav2Vec2 in evaluation mode")
def wav2vec2_eval():
    model, batch = wav2vec2()
    return model.eval(), own_loss, batch, lambda m: m(**doubled(batch)).loss


@case("transformers", "Llama, next token, loss of one's own")
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**TINY, **TOKENS, **WIDE, num_key_value_heads=1, max_position_embeddings=8, use_cache=False)
    tokens = ids()
    loss = lambda out, y: F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())  # noqa: E731
    return LlamaForCausalLM(config).eval(), loss, ({"input_ids": tokens}, tokens)


@case("transformers", "Mamba, own loss")
def mamba():
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=7, hidden_size=4, state_size=2, num_hidden_layers=1, expand=1, time_step_rank=2)
    batch = {"input_ids": (tokens := ids()), "labels": tokens}
    return MambaForCausalLM(config).train(), own_loss, batch, lambda m: m(**batch).loss


# ----------------------------------------------------------------------------------------------------------- diffusers


@case("diffusers", "UNet2DModel, noise prediction")
def unet():
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 8), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip
    inputs = {"sample": torch.randn(2, 1, 8, 8), "timestep": torch.tensor([3, 50])}
    return model, lambda out, noise: MSE(out.sample, noise), (inputs, torch.randn(2, 1, 8, 8))


@case("diffusers", "AutoencoderKL, reconstruction")
def vae_kl():
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        in_channels=1, out_channels=1, block_out_channels=(4,), latent_channels=2, norm_num_groups=2, sample_size=4,
    )  # fmt: skip
    x = torch.randn(2, 1, 4, 4)
    return model, lambda out, y: MSE(out.sample, y), (x, x)


# --------------------------------------------------------------------------------------------- dictionaries of tensors


@case("tensordict", "TensorDictSequential, a TensorDict as the batch")
def tensordict_sequential():
    from tensordict import TensorDict
    from tensordict.nn import TensorDictModule, TensorDictSequential

    model = TensorDictSequential(
        TensorDictModule(nn.Linear(3, 4), ["x"], ["h"]), TensorDictModule(nn.Linear(4, 2), ["h"], ["logits"])
    )
    batch = TensorDict({"x": torch.randn(8, 3), "y": torch.arange(8) % 2}, batch_size=[8])
    return (
        model,
        lambda out, y: CE(out["logits"], y),
        (batch, batch["y"]),
        lambda m: CE(m(batch.double())["logits"], batch["y"]),
    )


@case("tensordict", "ProbabilisticTensorDictModule's log-probability")
def tensordict_actor():
    from tensordict import TensorDict
    from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Categorical

    model = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), ["x"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True),
    )
    batch = TensorDict({"x": torch.randn(8, 3), "y": torch.rand(8)}, batch_size=[8])
    loss = lambda out, data: (out["logits"].log_softmax(-1)[:, 0] * data["y"]).mean()  # noqa: E731
    return model, loss, (batch, batch), lambda m: loss(m(batch.clone().double()), batch.double())


# ------------------------------------------------------------------------------------------------- flows and equations


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


@case("zuko", "CNF (adjoint of an ODE)", differences=True)
def cnf():
    import zuko

    model, c, x = zuko.flows.CNF(2, 1, hidden_features=[4], atol=1e-9, rtol=1e-8), torch.randn(4, 1), torch.randn(4, 2)
    return model, likelihood, (c, x)


class ODE(nn.Module):
    """Neural ODE."""

    def __init__(self, solver, width, **options):
        super().__init__()
        self.field, self.head = Field(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)), nn.Linear(2, 2)
        self.solver, self.options = solver, options

    def forward(self, x):
        return self.head(self.solver(self.field, x, torch.tensor([0.0, 1.0], dtype=x.dtype), **self.options)[-1])


class Field(nn.Sequential):
    """Right-hand side f(t, y)."""

    def forward(self, t, y):
        return super().forward(y)


@case("torchdiffeq", "odeint, dopri5")
def ode():
    from torchdiffeq import odeint

    return ODE(odeint, 4), CE, (torch.randn(8, 2), torch.arange(8) % 2)


@case("torchdiffeq", "odeint_adjoint, rk4", differences=True)
def ode_adjoint():
    from torchdiffeq import odeint_adjoint

    return (
        ODE(odeint_adjoint, 3, method="rk4", options={"step_size": 0.5}),
        CE,
        (torch.randn(8, 2), torch.arange(8) % 2),
    )


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


# --------------------------------------------------------------------------------------- by structure, torch alone


def mlp(*sizes, act=nn.Tanh):
    layers = []
    for i, o in itertools.pairwise(sizes):
        layers += [nn.Linear(i, o), act()]
    return nn.Sequential(*layers[:-1])


@case("torch", "PINN: u_xx + sin(u) and a boundary in the loss")
def pinn():
    def forward_loss(net, x):
        x = x.clone().requires_grad_()
        u = net(x)
        du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        return (torch.autograd.grad(du.sum(), x, create_graph=True)[0] + u.sin()).square().mean()

    model, x = mlp(1, 6, 6, 1), torch.linspace(-1, 1, 10)[:, None]
    edge = torch.tensor([[-1.0], [1.0]])
    loss = lambda out, x: forward_loss(model, x) + model(edge).square().mean()  # noqa: E731
    return model, loss, (x, x), lambda m: forward_loss(m, x.double()) + m(edge.double()).square().mean()


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(30 * x)


@case("torch", "SIREN, gradients and values supervised")
def siren():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(2, 6, 6, 1, act=Sine)
            with torch.no_grad():
                for p in self.parameters():
                    p /= 10

        def forward(self, x):
            x = x.clone().requires_grad_()
            return torch.cat([y := self.net(x), torch.autograd.grad(y.sum(), x, create_graph=True)[0]], 1)

    return Net(), MSE, (torch.rand(10, 2), torch.randn(10, 3))


@case("torch", "DeepONet: branch and trunk, root bias")
def deeponet():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch, self.trunk, self.bias = mlp(4, 5, 3), mlp(1, 5, 3), nn.Parameter(torch.zeros(1))

        def forward(self, u, y):
            return torch.einsum("bp,np->bn", self.branch(u), self.trunk(y)) + self.bias

    return Net(), MSE, ((torch.randn(6, 4), torch.rand(7, 1)), torch.randn(6, 7))


@case("torch", "FNO: spectral layer with complex weights")
def fno():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift, self.skip, self.out = nn.Linear(1, 3), nn.Conv1d(3, 3, 1), nn.Linear(3, 1)
            self.spectral = nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cfloat) / 3)

        def forward(self, x):
            h = self.lift(x).mT
            modes = torch.fft.rfft(h)[..., :4]
            low = torch.fft.irfft(torch.einsum("bim,iom->bom", modes, self.spectral), n=h.shape[-1])
            return self.out(torch.nn.functional.gelu(low + self.skip(h)).mT)

    return Net(), MSE, (torch.randn(4, 12, 1), torch.randn(4, 12, 1))


@case("torch", "SimCLR: two views, NT-Xent")
def simclr():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.projector = mlp(4, 6, 4), mlp(4, 4, 3)

        def forward(self, views):
            return F.normalize(self.projector(self.encoder(views)), dim=1)

    def loss(z, _):
        n = len(z) // 2
        scores = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
        return F.cross_entropy(scores, (torch.arange(2 * n) + n) % (2 * n))

    return Net(), loss, (torch.randn(12, 4), None)


@case("torch", "triplet margin loss, three inputs")
def triplet():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 5, 3)

        def forward(self, a, p, n):
            return self.net(a), self.net(p), self.net(n)

    return Net(), lambda out, _: F.triplet_margin_loss(*out), (tuple(torch.randn(3, 8, 4)), None)


@case("torch", "ArcFace: W in the loss")
def arcface():
    class ArcFace(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.randn(4, 3))

        def forward(self, h, y):
            cos = (F.normalize(h) @ F.normalize(self.W).mT).clamp(-1 + 1e-6, 1 - 1e-6)
            return CE(5 * torch.where(F.one_hot(y, 4).bool(), (cos.acos() + 0.3).cos(), cos), y)

    loss = ArcFace()
    twin = copy.deepcopy(loss).double()
    x, y = torch.randn(10, 4), torch.arange(10) % 4
    return mlp(4, 5, 3), loss, (x, y), lambda m: twin(m(x.double()), y)


@case("torch", "CTC over a GRU", differences=True)
def ctc():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 5)

        def forward(self, x):
            return self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)

    lengths = torch.full((3,), 8), torch.full((3,), 3)
    loss = lambda out, y: F.ctc_loss(out, y, *lengths)  # noqa: E731
    return Net(), loss, (torch.randn(3, 8, 3), torch.randint(1, 5, (3, 3)))


@case("torch", "detector: list of images, list of dicts as targets, dict of losses")
def detector():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.boxes, self.classes = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, images, targets=None):
            h = torch.stack([torch.tanh(self.trunk(i[None])).mean((2, 3))[0] for i in images])
            boxes, labels = (torch.stack([t[k] for t in targets]) for k in ("boxes", "labels"))
            return {"boxes": F.smooth_l1_loss(self.boxes(h), boxes), "classes": CE(self.classes(h), labels)}

    images = [torch.randn(1, 5 + i % 2, 6) for i in range(5)]
    targets = [{"boxes": torch.rand(4), "labels": torch.tensor(i % 3)} for i in range(5)]
    loss = lambda out, _: sum(out.values())  # noqa: E731
    return Net(), loss, ((images, targets), None), lambda m: loss(m(doubled(images), doubled(targets)), None)


@case("torch", "LSTM language model over a PackedSequence")
def packed_lstm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.rnn, self.head = nn.Embedding(7, 3), nn.LSTM(3, 4), nn.Linear(4, 7)

        def forward(self, packed):
            h = packed._replace(data=self.embedding(packed.data))
            return self.head(self.rnn(h)[0].data)

    packed = pack_sequence([torch.randint(0, 7, (n,)) for n in (5, 4, 2)])
    y = torch.randint(0, 7, (11,))
    return Net(), CE, (packed, y), lambda m: CE(m(packed), y)


@case("torch", "EmbeddingBag with offsets (text classification)")
def bag():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.fc = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

        def forward(self, text, offsets):
            return self.fc(self.bag(text, offsets))

    return Net(), CE, ((torch.randint(0, 9, (20,)), torch.arange(0, 20, 4)), torch.arange(5) % 3)


@case("torch", "mixture of experts: top 2 of 4, balance loss as an attribute")
def experts():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts, self.out = (
                nn.Linear(4, 4),
                nn.ModuleList(mlp(4, 3, 4) for _ in range(4)),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            p = self.gate(x).softmax(-1)
            self.balance = 4 * (p.mean(0) ** 2).sum()
            top, which = p.topk(2, -1)
            h = torch.stack([e(x) for e in self.experts], 1)
            return self.out((h.gather(1, which[..., None].expand(-1, -1, 4)) * top[..., None]).sum(1))

    model, x, y = Net(), torch.randn(10, 4), torch.arange(10) % 3
    return (
        model,
        lambda out, y: CE(out, y) + 0.1 * model.balance,
        (x, y),
        lambda m: CE(m(x.double()), y) + 0.1 * m.balance,
    )


@case("torch", "quantile regression (pinball loss)")
def quantiles():
    q = torch.tensor([0.1, 0.5, 0.9])
    loss = lambda out, y: torch.maximum(q * (y - out), (q - 1) * (y - out)).mean()  # noqa: E731
    return mlp(3, 6, 3), loss, (torch.randn(12, 3), torch.randn(12, 1))


@case("torch", "VAE: noise in the forward pass, ELBO")
def vae():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(2, 5)

        def forward(self, x):
            mu, log_var = self.encoder(x).chunk(2, 1)
            return self.decoder(mu + (log_var / 2).exp() * torch.randn_like(mu)), mu, log_var

    def loss(out, x):
        y, mu, v = out
        return F.binary_cross_entropy_with_logits(y, x) - 0.5 * (1 + v - mu**2 - v.exp()).mean()

    x = torch.rand(8, 5)
    return Net(), loss, (x, x)


@case("torch", "WGAN-GP discriminator: the penalty draws its own points")
def gan():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 6), nn.Softplus(), nn.Linear(6, 1))

        def forward(self, real, fake):
            return self.net(real), self.net(fake)

    model, real, fake = Net(), torch.randn(8, 3), torch.randn(8, 3) + 1

    def loss_of(m, real, fake):
        a = torch.rand(8, 1).to(real)
        x = (a * real + (1 - a) * fake).requires_grad_()
        g = torch.autograd.grad(m.net(x).sum(), x, create_graph=True)[0]
        r, f = m(real, fake)
        return f.mean() - r.mean() + 10 * (g.norm(dim=1) - 1).square().mean()

    loss = lambda out, _: loss_of(model, real.to(out[0]), fake.to(out[0]))  # noqa: E731
    return model, loss, ((real, fake), None), lambda m: loss_of(m, real.double(), fake.double())


@case("torch", "Chebyshev KAN (einsum over polynomials), no layer of torch")
def chebyshev():
    class Layer(nn.Module):
        def __init__(self, i, o, degree=3):
            super().__init__()
            self.coefficients = nn.Parameter(torch.randn(i, o, degree + 1) / i)

        def forward(self, x):
            x = torch.tanh(x)
            T = [torch.ones_like(x), x]
            while len(T) < self.coefficients.shape[2]:
                T.append(2 * x * T[-1] - T[-2])
            return torch.einsum("bid,iod->bo", torch.stack(T, -1), self.coefficients)

    return nn.Sequential(Layer(3, 4), Layer(4, 2)), CE, (torch.randn(12, 3), torch.arange(12) % 2)


@case("torch", "a deep linear network of plain parameters of the root module")
def root():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.A, self.B = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return self.scale * torch.tanh(x @ self.A) @ self.B

    return Net(), MSE, (torch.randn(10, 3), torch.randn(10, 2))


# ------------------------------------------------------------------------------------------------------------- running

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


def tried(one):
    """Row of the table for a case."""
    torch.manual_seed(0)
    model, loss, batch, *own = one.make()
    twin = copy.deepcopy(model).double()
    for p in twin.parameters():
        if p.is_complex():
            p.data = p.data.to(torch.complex128)
    loss_of = own[0] if own else functools.partial(as_called, loss, batch)
    seeded(1)
    try:
        result = hesscond.probe(model, loss, batch)
    except hesscond.HesscondError as error:
        return f"| {one.library} | {one.title} | refused: {error} | | |"
    truths = [Truth(twin, loss_of, differences=way, seed=1) for way in (False, True)][one.differences :]
    worst, by_differences = 0.0, one.differences
    blocks = [(block, unit) for block in result.values() for unit in list(block.blocks)[:UNITS]]
    for block, unit in blocks:
        found = [difference(block, unit, truths[0])]
        if len(truths) > 1 and found[0] > 1e-8:
            found.append(difference(block, unit, truths[1]))
            by_differences |= found[1] < found[0]
        worst = max(worst, min(found))
    count = f"{sum(len(block.conditions) for block in result.values())} in {len(result)} blocks"
    kinds = collections.Counter(reason.split(" with ")[0].split(":")[0] for reason in result.skipped.values())
    skipped = ", ".join(f"{number} {kind}" if number > 1 else kind for kind, number in kinds.items()).replace(
        "|", "\\|"
    )
    way = " (differences)" if by_differences else ""
    return f"| {one.library} | {one.title} | {count} | {skipped or 'nothing'} | {max(worst, 1e-15):.0e}{way} |"


def main():
    """Try the cases that are named, or all, and put their rows in place of those of the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="functions of the cases")
    names = parser.parse_args().names
    lines = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.exists() else []
    rows = {line.split(" | ")[1]: line for line in lines if line.startswith("| ")}
    for one in CASES:
        if names and one.name not in names:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows[one.title] = tried(one)
        print(rows[one.title], flush=True)
        known = [rows[case.title] for case in CASES if case.title in rows]
        PAGE.write_text(INTRODUCTION + "\n".join(known) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
