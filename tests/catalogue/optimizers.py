"""Optimizers that hold some layers."""

import torch
from torch import nn

from tests.catalogue.cases import add, double
from tests.catalogue.parts import CE, classes, named, stepped
from tests.catalogue.truths import Truth


def adam_root(state, group):
    return (state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]


#: √M of each optimizer from its state.
ROOTS = {
    "Adam": adam_root,
    "RMSprop": lambda state, group: state["square_avg"].sqrt() + group["eps"],
    "Adagrad": lambda state, group: state["sum"].sqrt() + group["eps"],
    "SGD": lambda state, group: torch.ones(()),
}
ROOTS["AdamW"] = ROOTS["NAdam"] = ROOTS["Adam"]


def held_truth(model, loss_fn, batch, options):
    """The truth in coordinates √M of what the optimizer holds, from its state."""
    names, scales = {id(p): name for name, p in model.named_parameters()}, {}
    method = options["method"]
    for one in method if isinstance(method, list) else [method]:
        for group in one.param_groups:
            for p in group["params"]:
                root = ROOTS[type(one).__name__](one.state[p], group).double()
                scales[names[id(p)]] = root.rsqrt().expand(p.shape)
    return Truth(double(model), loss_fn, batch, scales=scales)


def tanh_net():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)), CE, classes()


def norm_net():
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)), CE, classes()


def held(name, title, options, layer="0", make=tanh_net, **facts):
    """Add the row of a model whose optimizer holds some of its layers."""
    add(
        "Optimizers that hold some layers",
        name,
        title,
        make,
        layer,
        truth=held_truth,
        close=None,
        options=options,
        **facts,
    )


held("adam_last", "Adam of the last layer", stepped("Adam", ["4.*"]), "4")
held("adam_first", "Adam of the first layer", stepped("Adam", ["0.*"]))
held("adam_two", "Adam of two of three layers", stepped("Adam", ["0.*", "2.*"]), "2")
held("adam_no_bias", "Adam of weights only", stepped("Adam", ["*.weight"]))
held("adam_bias_only", "Adam of biases only", stepped("Adam", ["*.bias"]))
held("adam_one_bias_missing", "Adam of all but one bias", stepped("Adam", ["0.*", "2.weight", "4.*"]), "2")
held("adam_without_norm", "Adam of all but a normalization", stepped("Adam", ["0.*", "3.*"]), make=norm_net)
held("adam_norm_only", "Adam of a normalization only", stepped("Adam", ["1.*"]), "1", norm_net)
held("adam_named", "Adam of the last layer, the first one named", named(stepped("Adam", ["4.*"]), layers=["0"]))
held("adam_both_named", "Adam of the last layer, two named", named(stepped("Adam", ["4.*"]), layers=["0", "4"]), "4")
for kind in ("AdamW", "RMSprop", "Adagrad", "SGD"):
    held(f"{kind.lower()}_last", f"{kind} of the last layer", stepped(kind, ["4.*"]), "4")
held("two_adams", "two Adams of two of three layers", stepped("Adam", ["0.*", "4.*"], several=True))
held("all_held", "Adam of all layers", stepped("Adam", ["*"]), control=True)
held("adam_in_a_block", "Adam of the last layer, named in a block with the first",
    named(stepped("Adam", ["4.*"]), blocks={"both": ["0.weight", "4.weight"]}), "both", levels=("layer",))  # fmt: skip
