"""Every network of the registry at a reduced size, and a batch for it."""

import torch
from torch import nn

from hesscond.models import MODELS, build
from hesscond.study.runner import CrossEntropy

IMAGE = (2, 8, 8)
TINY = {"blocks": (1, 1), "widths": (4, 6)}
#: Input shape and options of each network; three outputs.
REDUCED = {
    "mlp": ((2, 3), {"hidden": (5, 4)}),
    "cnn5": (IMAGE, {"widths": (3, 4, 3), "padding": "same", "hidden": (5,)}),
    "cnn9": (IMAGE, {"widths": (3, 3, 4, 4), "pooled": (2, 4)}),
    "resnet20": (IMAGE, TINY),
    "resnet56": (IMAGE, {"blocks": (2, 2), "widths": (4, 6)}),
    "resnet110": (IMAGE, {"blocks": (3, 1), "widths": (4, 6)}),
    "preact-resnet20": (IMAGE, TINY | {"stem": 4}),
    "preact-resnet56": (IMAGE, {"blocks": (2, 2), "widths": (4, 6), "stem": 4}),
    "preact-resnet110": (IMAGE, {"blocks": (3, 1), "widths": (4, 6), "stem": 4}),
    "resnet18": ((2, 32, 32), TINY),
    "resnet50": (IMAGE, TINY | {"stem": "3x3"}),
    "wrn-28-10": (IMAGE, TINY | {"stem": 3}),
    "inception": (IMAGE, {"blocks": (1, 1), "stem": 4, "width": 0.1}),
    "googlenet": (IMAGE, {"blocks": (1, 1), "stem": 4, "width": 0.05}),
    "densenet": (IMAGE, {"blocks": (2, 2), "growth": 2, "stem": 4}),
    "densenet-bc-100-12": (IMAGE, {"blocks": (1, 2), "growth": 2, "bottleneck": 3, "stem": 4}),
    "vit-s16": (IMAGE, {"patch": 4, "width": 8, "depth": 2, "heads": 2, "hidden": 12}),
    "vit-b16": (IMAGE, {"patch": 4, "width": 6, "depth": 1, "heads": 3, "hidden": 8}),
    "nerf": ((2,), {"hidden": (6, 5), "after_skip": (4,), "frequencies": 2}),
    "nerf-rays": (
        (11,),
        {
            "hidden": (6, 5),
            "after_skip": (4,),
            "view": 4,
            "frequencies": 2,
            "view_frequencies": 1,
            "samples": (5,),
            "jitter": 0.0,
        },
    ),
    "dgcnn": ((7, 3), {"widths": (4, 5), "k": 3, "embedding": 6, "hidden": (5,)}),
    "gpt": ((5,), {"width": 8, "depth": 2, "heads": 2, "ratio": 2}),
}
OUTPUTS = 3


def reduced(name, *, seed=0, **options):
    shape, own = REDUCED[name]
    generator = torch.Generator().manual_seed(seed)
    return build(name, input_shape=shape, outputs=OUTPUTS, generator=generator, **own | options)


def batch(name, samples=6):
    """(loss, (inputs, targets)): a regression for the networks whose values lie in (0, 1), a class for every token."""
    generator = torch.Generator().manual_seed(1)
    if MODELS[name].kind == "tokens":
        tokens = torch.randint(OUTPUTS, (samples, REDUCED[name][0][0] + 1), generator=generator)
        return CrossEntropy(), (tokens[:, :-1], tokens[:, 1:])
    inputs = torch.randn(samples, *REDUCED[name][0], generator=generator)
    if name == "nerf-rays":
        inputs[:, 6], inputs[:, 7] = 0.0, 1.0
    if name.startswith("nerf"):
        return nn.MSELoss(), (inputs, torch.rand(samples, OUTPUTS, generator=generator))
    return nn.CrossEntropyLoss(), (inputs, torch.arange(samples) % OUTPUTS)


assert REDUCED.keys() == MODELS.keys()
