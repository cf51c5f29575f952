"""Random programs: small models that break what one might assume of a layer, written out as Python.

`write` gives the text of a module whose ``make()`` returns ``(model, loss_fn, data)``, as `hesscond probe FILE.py:make`
takes it, so that an example that fails can be read and run on its own. What a program detaches from the graph goes
through one of its functions in `FROZEN`: the Hessian holds such values fixed, and so does whoever moves a parameter.
"""

import random
from dataclasses import dataclass, field
from textwrap import indent

IMPORTS = """import random
import types

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
"""
#: Functions of a program whose results autograd takes for constants.
FROZEN = {
    "stop": "def stop(h):\n    return h.detach()\n",
    "gate": "@torch.no_grad()\ndef gate(h):\n    return torch.sigmoid(h)\n",
    "peak": "def peak(h):\n    return float(h.detach().abs().max())\n",
    "silent": "@torch.no_grad()\ndef silent(layer, h):\n    return layer(h)\n",
}
HELPERS = FROZEN | {
    "mixed": "@torch.jit.script\ndef mixed(h, w):\n    return torch.tanh(torch.matmul(h, w.t()))\n",
    "energy": "@torch.jit.script\ndef energy(w):\n    return w.square().mean()\n",
    "Cube": (
        "class Cube(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, h):\n        ctx.save_for_backward(h)\n        return h**3 / 3\n\n"
        "    @staticmethod\n    def backward(ctx, g):\n        (h,) = ctx.saved_tensors\n        return g * h**2\n"
    ),
    "Map": "class Map(nn.Module):\n    def forward(self, w):\n        return torch.tanh(w) * 1.3\n",
    "Loss": (
        "class Loss(nn.Module):\n    def __init__(self, model, loss_fn):\n        super().__init__()\n"
        "        self.model, self.loss_fn = model, loss_fn\n\n"
        "    def forward(self, o, t):\n        return self.loss_fn(o, t)\n"
    ),
    "checkpoint": "from torch.utils.checkpoint import checkpoint\n",
}
SMOOTH = ["torch.tanh({})", "F.silu({})", "F.gelu({})", "F.softplus({})", "torch.sin({})", "torch.softmax({}, -1)"]
KINKED = ["F.relu({})", "F.leaky_relu({}, 0.2)", "{}.abs()", "F.hardtanh({})", "F.elu({})", "torch.clamp({}, min=-0.3)"]
ACTIVATIONS = [*SMOOTH, *SMOOTH, *KINKED, "torch.sigmoid({})", "Cube.apply({})", "({}).square()"]
#: What a layer's own forward makes of its weight ``w``; ``{rows}`` brings a value a unit into its shape.
WEIGHTS = [
    "w * 0.7", "w * 2**0.5", "torch.tanh(w)", "F.normalize(w.flatten(1), dim=1).view_as(w)", "w * self.mask",
    "(w - w.mean()) / (w.std() + 0.1)", "w - w.flatten(1).mean(1){rows}", "w.square()", "torch.exp(w) - 1",
    "torch.softmax(w.flatten(1), 1).view_as(w)", "(self.a @ self.b).view_as(w) + w", "(self.a @ self.b).view_as(w)",
    "w * self.gain{rows}", "self.gain{rows} * w / w.flatten(1).norm(dim=1){rows}", "w.flip(0)", "w.roll(1, 0)",
    "w + stop(torch.round(8 * w) / 8 - w)", "w * stop(w).abs().mean()", "torch.where(w > 0, w, 0.3 * w)",
    "w * (1 + self.friend[0].weight.mean())", "w / w.abs().sum()", "torch.lerp(w, torch.ones_like(w), 0.2)",
    "w * self.scale", "w.clone().mul_(0.8)", "w.to(torch.float32).to(DTYPE)",
]  # fmt: skip
#: A number made of a layer's weight somewhere else in the model or the loss.
USES = [
    "{}.square().mean()", "{}.t().sum()", "{}.view(-1)[0]", "{}[0].sum()", "energy({})", "torch.linalg.matrix_norm({})",
    "torch.tanh({}).mean()", "nn.utils.parameters_to_vector([{}]).square().mean()", "stop({}).mean()",
]  # fmt: skip
#: (text, kind of target); ``o`` is the output, ``t`` the target.
LOSSES = [
    ("F.mse_loss(o, t)", "value"), ("F.mse_loss(o, t, reduction='sum')", "value"), ("F.cross_entropy(o, t)", "class"),
    ("F.cross_entropy(o, t, label_smoothing=0.1)", "class"), ("F.cross_entropy(o, t, reduction='sum')", "class"),
    ("F.binary_cross_entropy_with_logits(o, t.sigmoid())", "value"), ("F.huber_loss(o, t, delta=0.7)", "value"),
    ("F.smooth_l1_loss(o, t)", "value"), ("F.l1_loss(o, t)", "value"),
    ("torch.sqrt(1e-2 + (o - t).square()).mean()", "value"),
    ("torch.logsumexp(o, -1).mean() + 0.1 * o.square().mean()", "value"), ("(o.tanh() - t).square().mean()", "value"),
    ("F.kl_div(F.log_softmax(o, -1), t.softmax(-1), reduction='batchmean')", "value"),
    ("F.nll_loss(F.log_softmax(o, -1), t)", "class"), ("(o - t).abs().pow(3).mean()", "value"),
]  # fmt: skip

#: Surprises between two layers that are always the same: what the network is given, and what the forward pass does.
STEPS = {
    "stop": ("", "h = h + 0.5 * stop(h).square()"),
    "gate": ("", "h = h * gate(h)"),
    "peak": ("", "h = h / (1 + peak(h))"),
    "assigned": ("", "h = h.clone()\nh[..., 0] = h[..., -1].clone().sin()"),
    "running": ("self.register_buffer('running', torch.zeros(()))",
                "self.running.mul_(0.9).add_(stop(h).mean())\nh = h - self.running"),
    "counter": ("self.calls = 0", "self.calls += 1\nh = h * (1 + 0.1 * self.calls)"),
    "noise": ("", "h = h + 0.1 * torch.randn_like(h)"),
    "numpy": ("", "h = h * (1 + 0.1 * float(np.random.rand()))"),
    "python": ("", "h = h * (1 + 0.1 * random.random())"),
    "dropout": ("", "h = F.dropout(h, 0.3, training=self.training)"),
    "residual": ("", "h = h + 0.5 * torch.sin(h)"),
    "scale": ("self.scale = nn.Parameter(torch.tensor(1.2))", "h = h * self.scale"),
    "prelu": ("self.slope = nn.PReLU()", "h = self.slope(h)"),
    "twin": ("self.twin = self.{last}", ""),
    "unused": ("self.unused = nn.Linear({width}, 2)",
               "if float(stop(h).sum()) > 1e9:\n    h = h + self.unused(h).sum()"),
    "embedding": ("self.table = nn.Embedding(3, {width})",
                  "h = h * (1 + self.table.weight.mean()) + self.table(torch.ones((), dtype=torch.long)).mean()"),
    "weightless": ("", "h = F.linear(h, stop(self.{last}.weight).mean() * torch.eye(h.shape[-1]).to(h))"),
    "plain-tensor": ("self.number = torch.rand(())", "h = h * self.number.to(h)"),
}  # fmt: skip


@dataclass(frozen=True)
class Program:
    """One program and how to probe it.

    Attributes
    ----------
    seed
        It was written from.
    source
        The text of the module.
    level
        Level to probe at first.
    scaled
        Whether to probe in the coordinates of some P.
    summed
        Whether the loss of a stream is the sum of those of its batches, not their mean.
    """

    seed: int
    source: str
    level: str
    scaled: bool
    summed: bool


def write(seed):
    """The program of a seed."""
    return Author(random.Random(seed)).program(seed)


@dataclass
class Author:
    """Writes one program with the random choices of ``rng``."""

    rng: random.Random
    helpers: list = field(default_factory=list)
    classes: list = field(default_factory=list)
    init: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    #: What is done to the model once it is made.
    after: list = field(default_factory=list)
    #: Layers that can be called again or borrowed from: name -> (inputs, outputs).
    layers: dict = field(default_factory=dict)
    #: Names of layers whose weight is a parameter of their own.
    plain: list = field(default_factory=list)
    #: Those of them that are torch's own layers.
    simple: list = field(default_factory=list)
    #: How layers with arguments of their own are called.
    forms: dict = field(default_factory=dict)
    #: Names of layers that are not to be run again by a checkpoint.
    single: list = field(default_factory=list)
    #: A checkpoint that runs its part in no_grad first has no gradients inside and none taken through it.
    reentrant: bool = False
    gradients: bool = False

    def chance(self, probability):
        return self.rng.random() < probability

    def use(self, text):
        """``text``, with the helpers it calls put into the program."""
        for name in HELPERS:
            if f"{name}(" in text or f"{name}." in text:
                self.need(name)
        return text

    def need(self, name):
        if name not in self.helpers:
            self.helpers.append(name)

    def step(self, text):
        self.steps.append(self.use(text))

    def activated(self, text):
        return self.use(self.rng.choice(ACTIVATIONS).format(text))

    # layers

    def layer(self, n, m):
        """Write a layer from n to m features and return its name."""
        rng, name = self.rng, f"l{len(self.layers)}"
        conv = self.kind == "image"
        size, transposed = rng.choice([1, 2, 3]), conv and self.chance(0.2)
        options = f", {size}, padding={0 if transposed else size // 2}" if conv else ""
        if conv and not transposed and n % 2 == m % 2 == 0 and self.chance(0.2):
            options += ", groups=2"
        bias = self.chance(0.75)
        options += "" if bias else ", bias=False"
        kind = rng.choice(["plain"] * 4 + ["own"] * 5 + ["patched", "parametrized", "hooked"])
        base = "nn.ConvTranspose1d" if transposed else "nn.Conv1d" if conv else "nn.Linear"
        cls = self.own_class(base, bias) if kind == "own" else base
        self.init.append(f"self.{name} = {cls}({n}, {m}{options})")
        if kind == "patched":
            self.patched(name, base, bias)
        elif kind == "parametrized":
            self.parametrized(name, n, m, conv)
        else:
            self.plain.append(name)
            if cls == base:
                self.simple.append(name)
        if kind == "hooked" and self.layers:
            # a backward hook warns if the input of a layer needs no gradient
            self.after.append(f"model.{name}." + rng.choice([
                "register_forward_hook(lambda layer, args, out: 1.5 * out)",
                "register_forward_hook(lambda layer, args, out: out + layer.weight.mean())",
                "register_forward_pre_hook(lambda layer, args: (0.5 * args[0].sin(),))",
                "register_full_backward_hook(lambda layer, given, got: None)",
                "register_forward_pre_hook(lambda layer, args: None)",
            ]))  # fmt: skip
        if cls == base and kind == "plain" and not conv and self.chance(0.1):
            self.forms[name] = "self.{name}(input={h})"
        if cls != base and self.form is not None:
            self.forms[name] = self.form
        if cls != base and "mixed(" in self.classes[-1]:
            # torch cannot run a scripted function again
            self.single.append(name)
        if cls != base and "friend" in self.classes[-1]:
            friend = rng.choice([*self.plain, name])
            self.init.append(f"self.{name}.friend = [self.{friend}]")
        self.layers[name] = (n, m)
        return name

    def map(self, base, weight, bias, x="x"):
        """A layer's map written by hand."""
        if base != "nn.Linear":
            function = {"nn.Conv1d": "F.conv1d", "nn.ConvTranspose1d": "F.conv_transpose1d"}[base]
            return f"{function}({x}, {weight}, {bias}, padding=self.padding, groups=self.groups)"
        forms = [f"F.linear({x}, {weight}, {bias})"] * 2
        forms.append(f"{x} @ ({weight}).T" + ("" if bias == "None" else f" + {bias}"))
        forms.append(f"torch.einsum('...n,mn->...m', {x}, {weight})" + ("" if bias == "None" else f" + {bias}"))
        return self.rng.choice(forms)

    def own_class(self, base, bias):
        """Write a class with a forward of its own and return its name."""
        rng, name = self.rng, f"Layer{len(self.classes)}"
        weight = rng.choice(WEIGHTS).format(rows="[:, None]" if base == "nn.Linear" else ".view(-1, 1, 1)")
        own_bias = "None" if not bias else rng.choice(["self.bias"] * 3 + ["0.1 * self.bias", "self.bias.tanh()"])
        call = self.map(base, "W", own_bias)
        body = [f"w = self.weight\nW = {self.use(weight)}"]
        form = rng.choice(["map"] * 6 + ["inside"] * 2 + ["super", "inputs", "twice", "scripted", "gradient"])
        if form == "inside":
            call = self.activated(call)
        elif form == "super":
            body, call = [], rng.choice(["torch.tanh(super().forward(x))", "super().forward(2 * x)",
                                         "super().forward(x.sin()) * (1 + self.weight.mean())",
                                         "super().forward(x) + super().forward(-x).square()"])  # fmt: skip
        elif form == "inputs":
            body.append("x = x / (1 + x.square().mean(-1, keepdim=True))")
        elif form == "twice":
            call = f"{call} + {self.map(base, 'self.weight', 'None', '(0.5 * x.square())')}"
        elif form == "scripted" and base == "nn.Linear":
            call = self.use("mixed(x, W)")
        elif form == "gradient" and not self.reentrant:
            self.gradients = True
            inner = self.map(base, "self.weight", "None")
            body = [f"(g,) = torch.autograd.grad(({inner}).square().mean(), self.weight, create_graph=True)"]
            body.append("W = self.weight - 0.1 * g")
        text = "\n".join([*body, f"return {call}"])
        start = ["super().__init__(*args, **kwargs)"]
        if "self.mask" in text:
            start.append("self.register_buffer('mask', (torch.rand(self.weight.shape) > 0.3).float())")
        if "self.a " in text:
            start.append("self.a = nn.Parameter(torch.randn(len(self.weight), 1))")
            start.append("self.b = nn.Parameter(torch.randn(1, self.weight[0].numel()))")
        if "self.gain" in text:
            start.append("self.gain = nn.Parameter(0.5 + torch.rand(len(self.weight)))")
        if "self.scale" in text:
            start.append("self.scale = 1.7 / self.weight[0].numel()")
        init = "def __init__(self, *args, **kwargs):\n" + indent("\n".join(start), "    ")
        signature, self.form = "self, x", None
        if self.chance(0.15):
            signature, returned, self.form = rng.choice([
                ("self, *, x", "{}", "self.{name}(x={h})"),
                ("self, scale, x", "scale * {}", "self.{name}(0.8, {h})"),
                ("self, x, y", "{} * y.square().mean()", "self.{name}({h}, y={h}.sin())"),
                ("self, x", "({}, x)", "self.{name}({h})[0]"),
                ("self, x", "{{'out': {}}}", "self.{name}({h})['out']"),
            ])  # fmt: skip
            text = "\n".join([*body, "return " + returned.format(f"({call})")])
        methods = ([init] if len(start) > 1 else []) + [f"def forward({signature}):\n" + indent(text, "    ")]
        self.classes.append(f"class {name}({base}):\n" + indent("\n\n".join(methods), "    ") + "\n")
        return name

    def patched(self, name, base, bias):
        """Replace the forward of an instance."""
        weight = self.rng.choice(["1.4 * self.weight", "self.weight.tanh()", "self.weight", "self.weight.flip(0)"])
        call = self.map(base, weight, "self.bias" if bias else "None")
        if self.chance(0.3):
            call = self.activated(call)
        if self.chance(0.5):
            self.after.append(f"model.{name}.forward = (lambda self: lambda x: {call})(model.{name})")
        else:
            self.after.append(f"model.{name}.forward = types.MethodType(lambda self, x: {call}, model.{name})")

    def parametrized(self, name, n, m, conv):
        """Put a map in front of a layer's weight by torch's own means."""
        ways = [
            f"nn.utils.parametrize.register_parametrization(self.{name}, 'weight', Map())",
            f"nn.utils.parametrize.register_parametrization(self.{name}, 'weight', Map())",
            f"prune.random_unstructured(self.{name}, 'weight', 0.3)",
            f"nn.utils.parametrizations.spectral_norm(self.{name})",
            f"nn.utils.parametrizations.weight_norm(self.{name})",
        ]
        if not conv and m >= n:
            ways.append(f"nn.utils.parametrizations.orthogonal(self.{name}, orthogonal_map='cayley')")
        self.init.append(self.use(self.rng.choice(ways)))
        if "spectral_norm" in self.init[-1]:
            # a checkpoint would iterate once more in the backward pass, and give gradients of another function
            self.single.append(name)

    # the network

    def called(self, name, h="h"):
        """The call of a layer."""
        form = self.forms.get(name)
        if form is not None:
            return form.format(name=name, h=h)
        if name in self.single:
            return f"self.{name}({h})"
        if self.steps and not self.gradients and self.chance(0.08):
            self.need("checkpoint")
            self.reentrant = True
            return f"checkpoint(self.{name}, {h}, use_reentrant=True)"
        if self.chance(0.08):
            self.need("checkpoint")
            return f"checkpoint(self.{name}, {h}, use_reentrant=False)"
        return f"self.{name}({h})"

    def weight_use(self, where, names):
        """A number made of a weight of one of the layers."""
        weight = f"{where}.{self.rng.choice(names)}.weight"
        if self.kind == "image":
            weight += ".flatten(1)"
        return self.use(self.rng.choice(USES).format(weight))

    def surprise(self, width):
        """One thing that one does not expect between two layers."""
        rng = self.rng
        choice = rng.choice([
            "stop", "gate", "peak", "inplace", "assigned", "cast", "running", "counter", "noise", "numpy", "python",
            "generator", "borrowed", "transposed", "again", "norm", "dropout", "vmap", "residual", "kept", "scale",
            "plain-tensor", "prelu", "inner", "jacobian", "coupled",
            "silent", "twin", "fixed", "unused", "functional", "constant", "embedding", "cell",
            "attention", "bilinear", "weightless",
        ])  # fmt: skip
        last = f"l{len(self.layers) - 1}"
        if choice in STEPS:
            init, step = (text.format(width=width, last=last, n=len(self.steps)) for text in STEPS[choice])
            self.init += [init] if init else []
            if step:
                self.step(step)
        elif choice == "inplace":
            self.step("h = 1.0 * h\n" + rng.choice(["h.mul_(0.9)", "h += 0.3", "F.relu_(h)", "h.tanh_()"]))
        elif choice == "cast":
            self.step(rng.choice(["h = F.silu(h.float()).to(DTYPE)", "h = (h.to(torch.float32) * 1.1).to(h.dtype)"]))
        elif choice == "generator":
            kind = rng.choice(["torch.Generator().manual_seed(3)", "np.random.default_rng(3)", "random.Random(3)"])
            source = f"self.source{len(self.init)}"
            drawn = f"torch.rand((), generator={source}, dtype=h.dtype)" if "torch" in kind else f"{source}.random()"
            self.init.append(f"{source} = {kind}")
            self.step(f"h = h * (1 + 0.1 * float({drawn}))")
        elif choice == "again":
            square = [name for name, (n, m) in self.layers.items() if n == m == width]
            if square:
                self.step(f"h = {self.activated(self.called(rng.choice(square)))}")
        elif choice == "coupled":
            if self.kind == "flat" and self.chance(0.5):
                self.init.append(f"self.norm{len(self.steps)} = nn.BatchNorm1d({width})")
                self.step(f"h = self.norm{len(self.steps)}(h)")
            else:
                self.step("h = h - h.mean(0) + h")
        elif choice == "constant":
            self.step(f"h = h + {self.activated('torch.ones_like(h)')}")
        elif choice == "cell" and self.kind == "flat":
            self.init.append(f"self.cell = nn.{rng.choice(['GRU', 'LSTM', 'RNN'])}Cell({width}, {width})")
            self.step("h = self.cell(h)\nh = h[0] if isinstance(h, tuple) else h")
        elif choice == "attention" and self.kind == "tokens":
            self.init.append(f"self.attention = nn.MultiheadAttention({width}, 1, batch_first=True)")
            self.step("h = self.attention(h, h, h)[0]")
        elif choice in ("norm", "bilinear") and self.kind != "image":
            layer = f"nn.LayerNorm({width})" if choice == "norm" else f"nn.Bilinear({width}, {width}, {width})"
            name = f"norm{len(self.steps)}" if choice == "norm" else "pair"
            self.init.append(f"self.{name} = {layer}")
            self.step(f"h = self.{name}(h{', h.sin()' * (choice == 'bilinear')})")
        else:
            self.use_of_a_weight(choice, width, last)

    def use_of_a_weight(self, choice, width, last):
        """A surprise that takes the weights of layers elsewhere, or derivatives within the forward pass."""
        rng = self.rng
        if choice == "borrowed" and self.plain:
            self.step(f"h = h * (1 + 0.3 * {self.weight_use('self', self.plain)})")
        elif choice == "kept" and self.plain:
            name = rng.choice(self.plain)
            self.after.append(f"model.kept = [model.{name}.weight.view(-1)]")
            self.step("h = h * (1 + 0.3 * self.kept[0].square().mean())")
        elif choice == "transposed" and self.kind != "image" and last in self.plain:
            self.step(f"h = F.linear(torch.tanh(F.linear(h, self.{last}.weight.t())), self.{last}.weight)")
        elif choice == "vmap" and not self.reentrant and "checkpoint" not in self.helpers:
            self.step("h = torch.func.vmap(lambda z: torch.tanh(z) * z.sum())(h)")
        elif choice == "jacobian" and not self.reentrant:
            self.gradients = True
            self.step("h = h + 0.1 * torch.func.grad(lambda z: z.pow(3).sum().sin())(h)")
        elif choice == "silent":
            square = [name for name in self.simple if self.layers[name][0] == width and name not in self.forms]
            if square:
                self.step(f"h = h * (1 + 0.3 * silent(self.{rng.choice(square)}, h).mean())")
        elif choice == "fixed" and last in self.plain and last != "l0" and not self.gradients and not self.after:
            self.after.append(f"model.{last}.{rng.choice(['weight.', ''])}requires_grad_(False)")
        elif choice == "functional" and self.simple:
            name = rng.choice(self.simple)
            if self.layers[name] == (width, width) and self.kind != "image" and name not in self.forms:
                self.step(f"h = torch.func.functional_call(self.{name}, {{'weight': self.{name}.weight.sin()}}, (h,))")
        elif choice == "inner" and not self.reentrant and last in self.simple and self.kind != "image":
            n, m = self.layers[last]
            if n == m:
                self.gradients = True
                self.step(
                    f"(g,) = torch.autograd.grad(h.square().mean(), self.{last}.weight, create_graph=True)\n"
                    f"h = F.linear(h, self.{last}.weight - 0.1 * g)"
                )

    def program(self, seed):
        """All of it."""
        rng = self.rng
        self.kind = rng.choice(["flat"] * 4 + ["tokens", "image"])
        width = rng.randint(2, 4)
        inputs = width
        physical = self.chance(0.12)
        if physical:
            self.gradients = True
            self.step("x = x.detach().requires_grad_()\nh = x")
        else:
            self.step("h = x")
        start = len(self.steps)
        for _ in range(rng.randint(1, 2)):
            m = width if self.chance(0.4) else rng.randint(2, 4)
            name = self.layer(width, m)
            self.step(f"h = {self.activated(self.called(name) if len(self.steps) > start else self.first(name))}")
            width = m
            if self.chance(0.55):
                self.surprise(width)
        if self.kind != "flat":
            self.step("h = h.mean(-1)" if self.kind == "image" else "h = h.mean(1)")
        kind, self.kind = self.kind, "flat"
        outputs = rng.randint(1, 3)
        loss, target = rng.choice(LOSSES)
        outputs = max(outputs, 2) if target == "class" else outputs
        self.step(f"h = {self.called(self.layer(width, outputs))}")
        self.kind = kind
        if self.chance(0.1) and len(self.plain) > 1:
            one, other = rng.sample(self.plain, 2)
            if self.layers[one] == self.layers[other] and kind == "flat":
                self.after.append(f"model.{other}.weight = model.{one}.weight")
        if physical:
            self.step("(dx,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)")
            self.step("h = h + 0.3 * dx.flatten(1).square().sum(1, keepdim=True)")
        penalty = None
        if self.chance(0.1) and self.plain:
            penalty = f" + 0.1 * {self.weight_use('model', self.plain)}"
        elif self.chance(0.06) and not self.reentrant:
            # a gradient penalty: the loss differentiates what the model computed
            self.steps[0] = "x = x.detach().requires_grad_()\nh = x"
            self.step("return h, x")
            penalty = " + 0.2 * torch.autograd.grad(o.sum(), x, create_graph=True)[0].square().sum() / len(x)"
        elif self.chance(0.04):
            penalty = " + 0.1 * model(torch.ones_like(o.new_ones(SHAPE))).square().mean()"
        return self.finished(seed, inputs, loss, target, outputs, penalty)

    def first(self, name):
        """The call of the first layer, whose input needs no gradient."""
        return self.forms.get(name, "self.{name}({h})").format(name=name, h="h")

    def finished(self, seed, inputs, loss, target, outputs, penalty):
        rng = self.rng
        extra = {"flat": "", "tokens": f"{rng.randint(1, 3)}, ", "image": ""}[self.kind]
        tail = f", {rng.randint(2, 4)}" if self.kind == "image" else ""
        sizes = [rng.randint(2, 4), rng.randint(2, 4)] if self.chance(0.2) else [rng.randint(1, 6)]
        if "BatchNorm" in "".join(self.init):
            sizes = [max(2, size) for size in sizes]
        pairs = [
            f"(torch.randn({size}, {extra}{inputs}{tail}).to(DTYPE), "
            + (
                f"torch.randint(0, {outputs}, ({size},)))"
                if target == "class"
                else f"torch.randn({size}, {outputs}).to(DTYPE))"
            )
            for size in sizes
        ]
        data = pairs[0] if len(pairs) == 1 else "[" + ", ".join(pairs) + "]"
        if not self.steps[-1].startswith("return"):
            self.step("return h")
        loss_lines = []
        if penalty is not None and "(o.sum(), x" in penalty:
            loss_lines.append("o, x = o")
        if penalty is not None:
            shape = f"(2, {extra}{inputs}{tail})"
            penalty = self.use(penalty.replace("torch.ones_like(o.new_ones(SHAPE))", f"o.new_ones{shape}"))
        loss_lines.append(f"return {loss}{penalty or ''}")
        # a loss may hold the model, or a part of it
        module = penalty is not None and self.chance(0.3)
        make = [
            f"torch.default_generator.manual_seed({rng.randrange(10**6)})",
            f"model = Net().to(DTYPE).train({self.chance(0.6)})",
            *self.after,
            "",
            "def loss_fn(o, t):",
            *(f"    {line}" for line in loss_lines),
            "",
            f"return model, {'Loss(model, loss_fn)' if module else 'loss_fn'}, {data}",
        ]
        if module:
            self.need("Loss")
        dtype = "torch.float32" if self.chance(0.2) else "torch.float64"
        text = [
            IMPORTS,
            f"DTYPE = {dtype}\n\n",
            *(HELPERS[name] + "\n" for name in self.helpers),
            *(text + "\n" for text in self.classes),
            "class Net(nn.Module):",
            "    def __init__(self):",
            indent("\n".join(["super().__init__()", *self.init]), " " * 8),
            "",
            "    def forward(self, x):",
            indent("\n".join(self.steps), " " * 8),
            "\n",
            "def make():",
            indent("\n".join(make), "    "),
        ]
        level = rng.choice(["unit", "unit", "layer", "layer", "network"])
        return Program(seed, "\n".join(text) + "\n", level, self.chance(0.12), "reduction='sum'" in loss)
