"""What a block does in its network, from its name and the kind of its module: for figures by type and depth."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from hesscond.capture.layers import CONVOLUTIONS, TRANSPOSED
from hesscond.hessians.blocks import PACKED, PART, TABLES, Catalogue, is_transposed_dense

#: Last parts of names, in the libraries and papers that models come from.
NAMES = {
    "query": {"q_proj", "query", "to_q", "wq", "q_lin", "q", "q_proj_weight"},
    "key": {"k_proj", "key", "to_k", "wk", "k_lin", "k", "k_proj_weight"},
    "value": {"v_proj", "value", "to_v", "wv", "v_lin", "v", "v_proj_weight"},
    "attention output": {"out_proj", "o_proj", "to_out", "wo", "out_lin", "o"},
    "mlp in": {"c_fc", "fc1", "fc_in", "gate_proj", "up_proj", "w1", "w3", "linear1", "wi", "wi_0", "wi_1", "lin1"},
    "mlp out": {"fc2", "fc_out", "down_proj", "w2", "linear2", "lin2"},
    "head": {"lm_head", "head", "classifier", "score", "unembed", "unembedding"},
}
#: What the parameters of attention are called that has query, key and value in one layer.
PACKED_WEIGHTS = PACKED | {"in_proj_weight", "in_proj_bias"}
#: Parts of packed parameters.
LETTERS = {"q": "query", "k": "key", "v": "value"}
#: Names of modules with attention in them, and of those with a perceptron.
ATTENTION, MLP = re.compile(r"att(n|ention)", re.IGNORECASE), re.compile(r"mlp|ffn?|feed_?forward", re.IGNORECASE)


@dataclass(frozen=True)
class Role:
    """What a block does, and where.

    Attributes
    ----------
    kind
        "embedding", "position", "query", "key", "value", "query, key, value" (one layer for all), "attention output",
        "mlp in", "mlp out", "norm", "head", "bias" (alone), "recurrent", "convolution", "dense" or "other".
    depth
        Its index in the list of blocks that the network is made of; None: it is in none.
    """

    kind: str
    depth: int | None


def role(model: nn.Module, name: str) -> Role:
    """The role of a block of a model by its name, as `hesscond.probe` takes it: by convention, where there is one.

    Examples
    --------
    >>> model = nn.ModuleDict({"norm": nn.LayerNorm(4), "h": nn.ModuleList([nn.MultiheadAttention(4, 2)])})
    >>> role(model, "norm"), role(model, "h.0[q]")
    (Role(kind='norm', depth=None), Role(kind='query', depth=0))
    """
    catalogue = Catalogue(model)
    part = PART.fullmatch(name)
    base, letter = (part[1], part[2][0]) if part else (name, "")
    module = catalogue.module(base)
    owner, attribute = base, ""
    if module is None:
        owner, _, attribute = base.rpartition(".")
        owner = re.split(r"(?:^|\.)parametrizations(?:\.|$)", owner)[0]
        module = model.get_submodule(owner)
    return Role(kind(model, module, owner, attribute, letter), depth(model, owner))


def kind(model: nn.Module, module: nn.Module, owner: str, attribute: str, letter: str) -> str:
    """The kind of a module's block (``attribute`` empty) or of a parameter of it, or of a part of these."""
    leaf, around = owner.rpartition(".")[2], owner.rpartition(".")[0]
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrent"
    if "norm" in type(module).__name__.lower() or re.match(r"(.*norm|ln(_|\d|$))", leaf, re.IGNORECASE):
        return "norm"
    if isinstance(module, TABLES):
        return "position" if is_position(leaf) else "embedding"
    if letter in LETTERS and (leaf in PACKED or isinstance(module, nn.MultiheadAttention)):
        return LETTERS[letter]
    last = attribute or leaf
    if "bias" in attribute:
        return "bias"
    if leaf in PACKED or last in PACKED_WEIGHTS or isinstance(module, nn.MultiheadAttention):
        return next((found for found in ("query", "key", "value") if last in NAMES[found]), "query, key, value")
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return "convolution"
    if isinstance(module, nn.Linear) or is_transposed_dense(module):
        return dense_kind(leaf, around, model)
    if is_position(last):
        return "position"
    return "embedding" if re.search(r"cls|class|token|embed", last) else "other"


def is_position(name: str) -> bool:
    """Whether a table is of positions."""
    return bool(re.search(r"pos|wpe", name))


def dense_kind(leaf: str, around: str, model: nn.Module) -> str:
    """The kind of a dense layer by its name, and by those around it where the name says little."""
    if ATTENTION.search(around):
        found = next((own for own, names in NAMES.items() if leaf in names and own != "head"), None)
        return found or "attention output"
    if leaf in NAMES["head"] and depth(model, around) is None:
        return "head"
    if MLP.search(around) and leaf in ("c_proj", "dense", "wo", "2", "3"):
        return "mlp out"
    if MLP.search(around) and leaf == "0":
        return "mlp in"
    # BERT's
    if around.endswith("intermediate"):
        return "mlp in"
    if around.endswith("output"):
        return "mlp out"
    return next((own for own in ("mlp in", "mlp out") if leaf in NAMES[own]), "dense")


def depth(model: nn.Module, name: str) -> int | None:
    """The index of a module in the first list of blocks, or sequence of modules with others inside, around it."""
    module, steps = model, name.split(".") if name else []
    for step in steps:
        within = module._modules.get(step)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and within is not None:
            if isinstance(module, nn.ModuleList) or next(within.children(), None) is not None:
                return int(step) if step.isdigit() else None
            return None
        if within is None:
            return None
        module = within
    return None
