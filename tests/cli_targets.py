"""Files as a user would give them to the commands: a study, and a small network with what is wrong in other ones."""

NET = """
import torch
from torch import nn

print("made in the file")

def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].bias[2] = -100  # a dead unit
    return model, nn.CrossEntropyLoss(), (torch.randn(20, 6), torch.randint(0, 3, (20,)))

def batches():
    model, loss_fn, (inputs, targets) = make()
    return model, loss_fn, [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]

def bad_forward():
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x) + missing
    return Net(6, 3), nn.CrossEntropyLoss(), make()[2]

def bad_targets():
    model, loss_fn, (inputs, targets) = make()
    return model, loss_fn, (inputs, targets + 3)

def bad_shape():
    model, loss_fn, (inputs, targets) = make()
    return model, loss_fn, (inputs[:, :3], targets)

def bad_loss():
    def loss(output, target):
        raise RuntimeError("no loss today")
    return make()[0], loss, make()[2]

def functional_loss():
    return make()[0], torch.nn.functional.cross_entropy, (make()[2][0], torch.zeros(7, dtype=torch.long))

def in_place():
    def steps(module, args, output):
        for i in range(1, len(output)):
            output[i] = output[i] + output[i - 1].sin()
    model, loss_fn, data = make()
    model[3].register_forward_hook(steps)
    return model, loss_fn, data

def twice():
    def again(output, target):
        torch.autograd.grad(output.sum(), output)
        return torch.nn.functional.cross_entropy(output, target).square() + output.sum().backward()
    return make()[0], again, make()[2]

def leaves():
    def forward(x):
        raise SystemExit(3)
    model, loss_fn, data = make()
    model[4].forward = forward
    return model, loss_fn, data

def keywords():
    return make()[0], nn.CrossEntropyLoss(), {"pictures": make()[2][0], "labels": make()[2][1]}

def unlabelled():
    return make()[0], nn.CrossEntropyLoss(), [{"input": make()[2][0]}]

def nested():
    rows = torch.nested.nested_tensor([torch.zeros(2, 6), torch.zeros(3, 6)], layout=torch.jagged)
    return make()[0], nn.CrossEntropyLoss(), (rows, torch.zeros(5).long())

def arrays():
    return make()[0], nn.CrossEntropyLoss(), (make()[2][0].numpy(), make()[2][1].numpy())

def no_layer():
    return nn.ReLU(), nn.CrossEntropyLoss(), make()[2]

def fail():
    raise ValueError("the [/data] are missing")
"""
STUDY = """
name = "tiny"
description = "for the [/tests]"

[data]
name = "digits"

[model]
hidden = [8]

[training]
batch_size = 60
iterations = 3

[[learning_rates]]
batch_size = 60
rate = { vanilla = 0.1, bnp = 0.5 }

[probe]
layers = ["fc2"]
units = [3]
"""


def changed_study(path, old="", new="", *, text=STUDY):
    """A study file in which something else stands in one place."""
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path
