"""The networks of the studies: plain torch modules with the papers' initialization."""

from hesscond.models.mlp import ACTIVATIONS, MLP

__all__ = ["ACTIVATIONS", "MLP"]
