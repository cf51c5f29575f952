"""Layers that are used several times, and samples that depend on each other, at all levels."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.catalogue.cases import add, grid
from tests.catalogue.convolutions import cnn
from tests.catalogue.dense import mlp
from tests.catalogue.parts import CE, MSE, Net, labelled, paired, small, used, valued

shared = functools.partial(grid, "Layers that are used several times")


def siamese(activation):
    """One trunk on two inputs."""

    def forward(m, a, b):
        return m.head(torch.cat([m.activation(m.trunk(a)), m.activation(m.trunk(b))], 1))

    return Net(forward, trunk=nn.Linear(4, 4), head=nn.Linear(8, 3), activation=activation)


def repeated(activation, times=2):
    """The same layer several times, one after another."""

    def forward(m, x):
        h = m.activation(m.first(x))
        for _ in range(times):
            h = m.activation(m.layer(h))
        return m.head(h)

    return Net(forward, first=nn.Linear(5, 4), layer=nn.Linear(4, 4), head=nn.Linear(4, 3), activation=activation)


def recurrent_by_hand(activation):
    """A tiny recurrence over (N, T, d): the same Linear at every step."""

    def forward(m, x):
        h = x.new_zeros(len(x), 4)
        for step in range(x.shape[1]):
            h = m.activation(m.cell(torch.cat([x[:, step], h], 1)))
        return m.head(h)

    return Net(forward, cell=nn.Linear(3 + 4, 4), head=nn.Linear(4, 3), activation=activation)


def shared_shapes():
    """One layer on tokens (N, T, d) and on their mean (N, d)."""

    def forward(m, x):
        tokens, pooled = torch.relu(m.layer(x)), torch.relu(m.layer(x.mean(1)))
        return m.head(torch.cat([tokens.mean(1), pooled], 1))

    return Net(forward, layer=nn.Linear(4, 4), head=nn.Linear(8, 3))


def conv_pyramid():
    """One convolution at two resolutions."""

    def forward(m, x):
        fine, coarse = m.conv(x), m.conv(F.avg_pool2d(x, 2))
        return m.head(torch.cat([torch.relu(h).mean((2, 3)) for h in (fine, coarse)], 1))

    return Net(forward, conv=nn.Conv2d(1, 2, 3, padding=1), head=nn.Linear(4, 3))


def conv_twice(activation):
    """A residual block that applies the same convolution twice."""

    def forward(m, x):
        h = x + m.activation(m.conv(x))
        return m.head((h + m.activation(m.conv(h))).mean(2))

    return Net(forward, conv=nn.Conv1d(2, 2, 3, padding=1), head=nn.Linear(2, 3), activation=activation)


shared("siamese-relu", lambda: (siamese(nn.ReLU()), CE, paired(4, 4, by_name=True)), psd=True)
shared("siamese-tanh", lambda: (siamese(nn.Tanh()), MSE, paired(4, 4, real=True)))
shared("repeated-relu", lambda: (repeated(nn.ReLU()), CE, labelled(5)))
shared("repeated-linear", lambda: (repeated(nn.Identity(), 3), MSE, valued(5)))
shared("recurrent-tanh", lambda: (recurrent_by_hand(nn.Tanh()), CE, labelled(3, 3)))
shared("recurrent-relu", lambda: (recurrent_by_hand(nn.ReLU()), MSE, valued(4, 3)))
shared("shared-shapes", lambda: (shared_shapes(), CE, labelled(3, 4)), psd=True)
shared("conv-pyramid", lambda: (conv_pyramid(), CE, labelled(1, 4, 4)), psd=True)
shared("conv-twice", lambda: (conv_twice(nn.Tanh()), CE, labelled(2, 5)))

coupled = functools.partial(grid, "Samples that depend on each other", streams=False)


def centred(activation=None):
    """Batch statistics by hand: centring couples the samples linearly."""
    activation = activation or nn.Identity()

    def forward(m, x):
        h = m.a(x)
        return m.b(m.activation(h - h.mean(0)))

    return Net(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3), activation=activation)


def neighbours(output, target):
    """Each sample with the one before it."""
    return F.cross_entropy(output + 0.5 * output.roll(1, 0), target)


def pairs(output, target):
    """Contrastive: sample j with sample j + N/2."""
    half = len(output) // 2
    distance = (output[:half] - output[half:]).square().sum(1)
    same = target[:half] == target[half:]
    return torch.where(same, distance, F.softplus(1 - distance)).mean()


def info_nce(output, target):
    """Every sample of the first half against all of the second."""
    a, b = F.normalize(output, dim=1).chunk(2)
    return F.cross_entropy(a @ b.T / 0.5, torch.arange(len(a), device=a.device))


coupled("train-batchnorm-tanh-mse", lambda: (small(nn.Tanh(), used(nn.BatchNorm1d(4))), MSE, valued(5, n=12)))
coupled("train-batchnorm-first",
    lambda: (nn.Sequential(used(nn.BatchNorm1d(5)), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), CE,
             labelled(5)))  # fmt: skip
coupled("train-batchnorm-conv",
    lambda: (cnn(nn.Conv2d(1, 2, 2), 8, after=(used(nn.BatchNorm2d(2)),)), CE, labelled(1, 3, 3, n=5)))  # fmt: skip
coupled("batch-centring", lambda: (centred(), CE, labelled(5)), psd=True)
coupled("batch-centring-tanh", lambda: (centred(nn.Tanh()), CE, labelled(5)))
coupled("neighbours-in-the-loss", lambda: (mlp(nn.ReLU()), neighbours, labelled(5)), psd=True)
coupled("contrastive-pairs", lambda: (mlp(nn.ReLU()), pairs, labelled(5, n=8)))
coupled("info-nce", lambda: (mlp(nn.Tanh()), info_nce, labelled(5, n=8)))


several_ways = functools.partial(add, "Parameters that are used in several ways", title=None)


def tied(*layers):
    """Layers, of which the third has the weight of the first."""
    model = nn.Sequential(*layers)
    model[2].weight = model[0].weight
    return model


def tied_bias():
    model = mlp(sizes=(5, 5, 5, 3))
    model[2].bias = model[0].bias
    return model


def borrowing(m, x):
    """A weight used by its layer, or not, and once more behind its back."""
    h = torch.relu(m.first(x))
    return m.head(F.linear(torch.tanh(m.lent(h)) if m.called else h, m.lent.weight))


def borrowed(called):
    return Net(borrowing, first=nn.Linear(5, 5), lent=nn.Linear(5, 5), head=nn.Linear(5, 3), called=called)


def by_its_weight():
    """Attention uses the weight of its output projection without calling it."""
    return Net(lambda m, x: m.head(m.attention(x, x, x, need_weights=False)[0].mean(1)),
               attention=nn.MultiheadAttention(4, 2, batch_first=True), head=nn.Linear(4, 3))  # fmt: skip


several_ways("tied", build=lambda: (tied(*mlp(sizes=(5, 5, 5, 3))), CE, labelled(5)))
several_ways("tied-convolutions",
    build=lambda: (tied(nn.ConvTranspose2d(2, 2, 1), nn.Tanh(), nn.ConvTranspose2d(2, 2, 1, bias=False), nn.Flatten(),
                        nn.Linear(18, 3)), CE, labelled(2, 3, 3)))  # fmt: skip
several_ways("tied-to-an-embedding",
    build=lambda: (tied(nn.Embedding(6, 4), nn.Tanh(), nn.Linear(4, 6)), CE,
                   (torch.tensor([0, 1, 2, 3, 4, 5, 1]), torch.randint(0, 3, (7,)))))  # fmt: skip
several_ways("tied-bias", build=lambda: (tied_bias(), CE, labelled(5)))
several_ways("borrowed", build=lambda: (borrowed(True), CE, labelled(5)))
several_ways("borrowed-never-called", build=lambda: (borrowed(False), CE, labelled(5)))
several_ways("attention-by-its-weight", build=lambda: (by_its_weight(), CE, labelled(3, 4)))
