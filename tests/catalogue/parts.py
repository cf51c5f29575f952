"""What models of the catalogue are made of: modules of functions, losses, data."""

from fnmatch import fnmatch

import torch
from torch import nn

from tests.catalogue.cases import double
from tests.catalogue.truths import formula_truth

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


class Net(nn.Module):
    """Parts by name, and a forward pass as a function of them and the inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


def classes(n=20, d=4, c=3):
    """Features and labels."""
    return torch.randn(n, d), torch.randint(0, c, (n,))


def values(n=20, d=4, c=3):
    """Features and real targets."""
    return torch.randn(n, d), torch.randn(n, c)


def images(n=12, channels=2, side=4, c=3):
    """Images and labels."""
    return torch.randn(n, channels, side, side), torch.randint(0, c, (n,))


def tokens(n=8, length=4, d=4, c=3):
    """Sequences of vectors and a label for each."""
    return torch.randn(n, length, d), torch.randint(0, c, (n,))


def drawn(*shape, classes=3, seed=0, dtype=None):
    """Inputs of a shape and their labels, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype), torch.randint(classes, shape[:1], generator=generator)


class Drawn:
    """Data of the seed of the moment, which do not depend on what a model has drawn, nor change what it draws."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64).float()

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator)


def labelled(*shape, n=7, to=()):
    """Inputs of a shape, and labels, one for each or more."""
    draw = Drawn()
    return draw.normal(n, *shape), draw.integers(3, n, *to)


def valued(*shape, n=7, to=(3,)):
    """Inputs of a shape, and real targets of another."""
    draw = Drawn()
    return draw.normal(n, *shape), draw.normal(n, *to)


def paired(a, b, n=7, by_name=False, real=False):
    """Two inputs with as many features, as arguments in their order or by name, and labels or real targets."""
    draw = Drawn()
    inputs = draw.normal(n, a), draw.normal(n, b)
    target = draw.normal(n, 3) if real else draw.integers(3, n)
    return dict(zip("ab", inputs, strict=True)) if by_name else inputs, target


def words(n, length=3):
    """Token ids, and a label for each sequence."""
    draw = Drawn()
    return draw.integers(6, n, length), draw.integers(3, n)


def next_words(n, length=3):
    """Token ids, and others to predict at each."""
    draw = Drawn()
    return draw.integers(6, n, length), draw.integers(6, n, length)


def by_token(output, target):
    """Cross-entropy of all tokens alike."""
    return CE(output.flatten(0, 1), target.flatten())


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def mlp(activation=None, *, sizes=(4, 5, 3, 3), bias=True):
    """Three dense layers."""
    activation, (a, b, c, d) = activation or nn.ReLU(), sizes
    hidden = nn.Linear(a, b, bias), activation, nn.Linear(b, c, bias), activation
    return nn.Sequential(*hidden, nn.Linear(c, d))


def small(activation, *between):
    """Linear 5 → 4, then ``between``, the activation, and Linear 4 → 3."""
    return nn.Sequential(nn.Linear(5, 4), *between, activation, nn.Linear(4, 3))


def around(layer, width=3, activation=None):
    """A layer from 4 to ``width`` and a dense head."""
    return nn.Sequential(layer, activation or nn.Tanh(), nn.Linear(width, 3))


def used(norm):
    """A batch normalization that has seen data: running statistics, scales and shifts are not the initial ones."""
    with torch.no_grad():
        for tensor in (norm.running_mean, norm.weight, norm.bias):
            tensor.add_(0.3 * torch.randn(tensor.shape))
        norm.running_var.mul_(0.5 + torch.rand(norm.running_var.shape))
    return norm


def changed(change, twin=double):
    """Twin of a model, changed in place by ``change(twin)``."""

    def make(model):
        made = twin(model)
        change(made)
        return made

    return make


def recurrent(layer):
    """A recurrent layer of torch and a head on its last state."""
    return Net(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=layer(3, 3, batch_first=True), head=nn.Linear(3, 3))


class Cube(torch.autograd.Function):
    """x³ with a backward that can be differentiated again."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class OnceOnly(Cube):
    """The same with a backward that says it cannot."""

    backward = staticmethod(torch.autograd.function.once_differentiable(Cube.backward))


def reloaded(model, twin):
    """A twin with the state of the model, which holds tensors that are no leaves, and so not copied."""
    twin.load_state_dict(model.state_dict())
    return twin.double()


def middle(function, width=3):
    """A dense layer, a function of its outputs, another dense layer."""
    return nn.Sequential(nn.Linear(4, width), Applied(function), nn.Linear(width, 3))


def replaced(**parts):
    """Twin with other parts."""

    def make(model):
        twin = double(model)
        for name, part in parts.items():
            setattr(twin, name, part)
        return twin

    return make


def with_functions(replacements):
    """Twin in which functions at `Applied` modules are replaced."""

    def make(model):
        twin = double(model)
        for name, function in replacements.items():
            twin.get_submodule(name).function = function
        return twin

    return make


def scaled_loss(factor, loss):
    return lambda output, target: factor * loss(output, target)


def elementwise(row, name, title, loss, exact, inputs, *, weight=None, difference=False):
    """Add the row of a linear model and a loss: the mean of ``loss(z)``, in mpmath of ``exact(mp, z)``."""

    def make():
        x = inputs().double()
        model = nn.Sequential(nn.Linear(x.shape[1], 1)).double()
        if weight is not None:
            with torch.no_grad():
                model[0].weight.copy_(torch.tensor([weight]))
                model[0].bias.fill_(0.0)
        return model, lambda o, t: loss(o).mean(), (x, torch.zeros(len(x), 1).double())

    def formula(mp, own, rows):
        z = rows @ own["0.weight"].T + own["0.bias"]
        return sum(exact(mp, one) for one in z.flat) / z.size

    row(name, title, make, truth=formula_truth(formula, difference=difference))


def stepped(kind, names, several=False, **settings):
    """Options with an optimizer of these parameters (globs) after three steps; ``several``: one for each glob."""

    def options(model, loss_fn, batch):
        groups = [[p for name, p in model.named_parameters() if fnmatch(name, glob)] for glob in names]
        groups = groups if several else [[p for own in groups for p in own]]
        optimizers = [getattr(torch.optim, kind)(own, lr=0.01, **settings) for own in groups]
        for _ in range(3):
            for one in optimizers:
                one.zero_grad()
            loss_fn(model(batch[0]), batch[1]).backward()
            for one in optimizers:
                one.step()
        model.zero_grad()
        return {"method": optimizers if several else optimizers[0]}

    return options


def named(options, **more):
    """Options with more arguments."""
    return lambda *problem: options(*problem) | more
