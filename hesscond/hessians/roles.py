"""Role and depth of a block in its network, by its name, for figures of models and of runs by type and depth."""

from __future__ import annotations

import re
from typing import NamedTuple

#: Name of all parameters together, in place of a layer name.
NETWORK = "network"

#: Pattern of the names of attention modules and attributes.
ATTENTION = r"\w*att(?:n|ention)\w*"


def projection(letter: str, kind: str) -> tuple[str, str]:
    """Place and name pattern of the query, key or value projection of attention."""
    return "within", rf"({letter}|{kind})(_proj(_weight)?)?|to_{letter}|{letter}_lin|w{letter}"


#: Place and endings of names, by kind: "within" attention or a numbered block of a transformer, "outside" of all
#: numbered blocks, or "anywhere". Kinds are tried in this order, which is also that of rows. The names are those of
#: this package, of torch, of Hugging Face's GPT-2, LLaMA, BERT, ViT and T5, of torchvision and timm.
CONVENTIONS = {
    "embedding": (
        "outside",
        r"(?!\w*pos)\w*emb(eddings?|ed)?|wte|embed_tokens|patch\w*(\.proj\w*)?|conv_proj",
    ),
    "position": ("outside", r"wpe|(\w+_)?pos(ition\w*|_?emb\w*)?"),
    "class token": ("outside", r"(cls|class)_token"),
    "norm": ("anywhere", r"(ln|bn)(_\w+|\d\w*)?|\w*norm\w*"),
    "query": projection("q", "query"),
    "key": projection("k", "key"),
    "value": projection("v", "value"),
    "query, key, value": ("within", r"w?qkv(_proj)?|c_attn|in_proj(_weight|_bias)?|query_key_value"),
    "attention output": (
        "within",
        rf"o_proj|out_proj|out_lin|({ATTENTION}\.)+(out|output|(output\.)?dense|c?_?proj|wo|o)"
        rf"|({ATTENTION}\.)*to_out(\.0)?",
    ),
    "mlp gate": ("within", r"gate_proj|w1"),
    "mlp in": (
        "within",
        r"fc1|c_fc|up_proj|fc_in|lin1|linear1|wi(_\d)?|w3|intermediate\.dense|dense_h_to_4h"
        r"|(mlp|ffn?|feed_?forward)\.(0|fc|in)",
    ),
    "mlp out": (
        "within",
        r"fc2|down_proj|fc_out|lin2|linear2|w2|wo|output\.dense|dense_4h_to_h"
        r"|(mlp|ffn?|feed_?forward)\.([1-9]|c_proj|proj|out|dense)",
    ),
    "head": ("outside", r"heads?|heads\.head|lm_head|classifier|score|unembed(ding)?|output|fc"),
    "recurrent": ("anywhere", r"(lstm|gru|rnn)\d*|(weight|bias)_(ih|hh|hr)(_l\d+(_reverse)?)?"),
}
#: All kinds in the order of rows; kinds without a convention are only known from the module.
KINDS = (*CONVENTIONS, "bias", "convolution", "dense", "other")
#: Pattern of the names that number the blocks of a model.
DEPTH = re.compile(r"(?:|\w*(?:block|layer)_?)(\d+)")
#: Parts of packed parameters; other parts are gates, layers and directions of a recurrence, or ranges of rows.
LETTERS = {"q": "query", "k": "key", "v": "value"}


class Role(NamedTuple):
    """Role of a block: its kind and its depth.

    Attributes
    ----------
    kind
        "embedding", "position", "class token", "norm", "query", "key", "value", "query, key, value" (one layer for
        all), "attention output", "mlp gate", "mlp in", "mlp out", "head", "recurrent", "bias" (alone, and not that of a
        norm), "convolution", "dense" or "other".
    depth
        First number in its name that counts blocks, as written there: 1 in ``block1.fc1``, 0 in ``h.0.fc1``.
        None: the block is in no numbered block.
    """

    kind: str
    depth: int | None


def role_of(name: str) -> Role:
    """Role of a block by its name alone, by convention; the kind of a block without a convention is its name.

    The name is taken within the numbered block if there is one, else as a whole. `hesscond.hessians.role` looks at the
    module too.
    """
    path, _, part = name.partition("[")
    # parameters behind a weight have the role of the layer
    inside = re.split(r"\.(?:parametrizations|base_layer|lora_[AB])(?:\.|$)", path)[0].split(".")
    attribute = inside[-1]
    if attribute in ("weight", "bias") and len(inside) > 1:
        inside.pop()
    part_kind, depth = LETTERS.get(part.rstrip("]").partition(".")[0]), None
    # the last number is that of the layer itself, except for packed attention in a list
    for place, component in enumerate(inside if part_kind else inside[:-1]):
        if match := DEPTH.fullmatch(component):
            depth, inside = int(match[1]), inside[place + 1 :]
            break
    if part_kind:
        return Role(part_kind, depth)
    if re.match(r"[ifgorzn]\]|l\d", part):
        return Role("recurrent", depth)
    kind = rest = ".".join(inside)
    within = depth is not None or any(re.fullmatch(ATTENTION, module, re.IGNORECASE) for module in inside[:-1])
    fits = {"anywhere": True, "within": within, "outside": depth is None}
    for candidate, (where, pattern) in CONVENTIONS.items():
        if fits[where] and re.fullmatch(rf"(?:.*\.)?(?:{pattern})", rest, re.IGNORECASE):
            kind = candidate
            break
    return Role("bias" if "bias" in attribute and kind not in ("norm", "recurrent") else kind, depth)
