"""Cases (model, loss, batch) that every level and method is tried on, and the dense truth for them."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, hessian


class Residual(nn.Module):
    """Two dense layers around a skip connection."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.activation = activation

    def forward(self, x):
        h = self.activation(self.first(x))
        return self.last(h + self.activation(self.inner(h)))


class TwoInputs(nn.Module):
    """A shared trunk with two inputs, as keyword arguments."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, a, b):
        return self.head(torch.relu(self.left(a) + self.right(b)))


def mlp(activation, *, bias=True):
    return nn.Sequential(
        nn.Linear(5, 6, bias=bias), activation, nn.Linear(6, 4, bias=bias), activation, nn.Linear(4, 3)
    )


def mean_of_squares_with_tanh(output, target):
    return (torch.tanh(output) - target).square().mean()


@dataclass(frozen=True)
class Case:
    name: str
    build: object
    loss: object
    target: str  # "class", "value", "probability" or "binary"
    samples: int = 7
    dtype: torch.dtype = torch.float64
    inputs: str = "plain"

    def make(self, seed=0, device="cpu"):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        model = self.build().to(self.dtype).to(device)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype).to(device)

        if self.inputs == "keywords":
            x = {"a": normal(self.samples, 3), "b": normal(self.samples, 2)}
        else:
            x = normal(self.samples, 5)
        targets = {
            "class": lambda: torch.randint(0, 3, (self.samples,), generator=generator).to(device),
            "value": lambda: normal(self.samples, 3),
            "probability": lambda: torch.softmax(normal(self.samples, 3), 1),
            "binary": lambda: (normal(self.samples, 3) > 0).to(self.dtype),
        }
        return model, self.loss, (x, targets[self.target]())


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

CASES = [
    Case("relu-ce", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "class"),
    Case("relu-inplace-ce", lambda: mlp(nn.ReLU(inplace=True)), nn.CrossEntropyLoss(), "class"),
    Case("leaky-ce-sum", lambda: mlp(nn.LeakyReLU(0.1)), nn.CrossEntropyLoss(reduction="sum"), "class"),
    Case("relu-ce-smoothed", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(label_smoothing=0.2), "class"),
    Case("relu-ce-weighted", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "class"),
    Case("relu-ce-ignored", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(ignore_index=1), "class"),
    Case("relu-ce-probabilities", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "probability"),
    Case("relu-ce-functional", lambda: mlp(nn.ReLU()), nn.functional.cross_entropy, "class"),
    Case("relu-ce-lambda", lambda: mlp(nn.ReLU()), lambda o, t: nn.functional.cross_entropy(o, t), "class"),
    Case("relu-mse", lambda: mlp(nn.ReLU()), nn.MSELoss(), "value"),
    Case("relu-bce", lambda: mlp(nn.ReLU()), nn.BCEWithLogitsLoss(), "binary"),
    Case("relu-huber", lambda: mlp(nn.ReLU()), nn.HuberLoss(), "value"),
    Case("relu-nonconvex", lambda: mlp(nn.ReLU()), mean_of_squares_with_tanh, "value"),
    Case("tanh-ce", lambda: mlp(nn.Tanh()), nn.CrossEntropyLoss(), "class"),
    Case("gelu-mse", lambda: mlp(nn.GELU()), nn.MSELoss(reduction="sum"), "value"),
    Case("sigmoid-ce", lambda: mlp(nn.Sigmoid()), nn.CrossEntropyLoss(), "class"),
    Case("no-bias", lambda: mlp(nn.ReLU(), bias=False), nn.CrossEntropyLoss(), "class"),
    Case("one-sample", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "class", samples=1),
    Case("many-samples", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "class", samples=60),
    Case("float32", lambda: mlp(nn.ReLU()), nn.CrossEntropyLoss(), "class", dtype=torch.float32),
    Case("float32-tanh", lambda: mlp(nn.Tanh()), nn.CrossEntropyLoss(), "class", dtype=torch.float32),
    Case("residual-relu", lambda: Residual(nn.ReLU()), nn.CrossEntropyLoss(), "class"),
    Case("residual-tanh", lambda: Residual(nn.Tanh()), nn.MSELoss(), "value"),
    Case("two-inputs", TwoInputs, nn.CrossEntropyLoss(), "class", inputs="keywords"),
    Case("eval-dropout", lambda: nn.Sequential(mlp(nn.ReLU()), nn.Dropout(0.5)).eval(), nn.CrossEntropyLoss(), "class"),
    Case(
        "eval-batchnorm",
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).eval(),
        nn.CrossEntropyLoss(),
        "class",
    ),
    Case(
        "layernorm",
        lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 3)),
        nn.CrossEntropyLoss(),
        "class",
    ),
]


def dense_truth(model, loss_fn, batch, layer, unit):
    """The unit's Hessian by `torch.func.hessian` in float64, order [bias, weight row]."""
    inputs, target = batch
    double = {k: v.detach().double() for k, v in [*model.named_parameters(), *model.named_buffers()]}
    double = {k: v if v.is_floating_point() else v.long() for k, v in double.items()}
    if isinstance(inputs, dict):
        args, kwargs = (), {k: v.double() for k, v in inputs.items()}
    else:
        args, kwargs = (inputs.double(),), {}
    if target.is_floating_point():
        target = target.double()
    weight, bias = double[f"{layer}.weight"], double.get(f"{layer}.bias")

    def loss(parameters):
        state = dict(double)
        if bias is not None:
            chosen = torch.arange(len(bias), device=bias.device) == unit
            state[f"{layer}.bias"] = torch.where(chosen, parameters[0], bias)
        row = parameters if bias is None else parameters[1:]
        state[f"{layer}.weight"] = torch.cat([weight[:unit], row[None], weight[unit + 1 :]])
        return loss_fn(functional_call(model, state, args, kwargs), target)

    start = weight[unit] if bias is None else torch.cat([bias[unit : unit + 1], weight[unit]])
    return hessian(loss)(start)
