"""The decoder-only transformer: torch's own layers with its weights, what a token sees, and its options."""

import pytest
import torch
from torch import nn

from tests.models.reduced import batch, reduced

#: What our layers are called in torch's.
NAMES = {"self_attn.out_proj": "attention.out", "linear1": "fc1", "linear2": "fc2", "norm1": "norm1", "norm2": "norm2"}


def torchs(model, width, heads, hidden):
    """The blocks of a model as torch has them, which packs query, key and value."""
    for name in model.blocks:
        block = model.get_submodule(name)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", 1e-5, batch_first=True, norm_first=True)
        state = {
            f"{its}.{key}": v for its, own in NAMES.items() for key, v in block.get_submodule(own).state_dict().items()
        }
        parts = [getattr(block.attention, part) for part in "qkv"]
        state |= {f"self_attn.in_proj_{key}": torch.cat([getattr(p, key) for p in parts]) for key in ("weight", "bias")}
        layer.load_state_dict(state)
        yield layer


def test_its_blocks_are_those_of_torch():
    model, (_, (tokens, _)) = reduced("gpt"), batch("gpt")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    x = model.embedding.weight[tokens] + model.positions.weight[: tokens.shape[1]]
    mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    for layer in torchs(model, 8, 2, 16):
        x = layer(x, src_mask=mask)
    truth = nn.functional.layer_norm(x, (8,), model.norm.weight, model.norm.bias) @ model.fc.weight.T
    torch.testing.assert_close(model(tokens), truth)


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_no_token_sees_a_later_one(norm):
    model, (_, (tokens, _)) = reduced("gpt", norm=norm, init_scale=20.0).double(), batch("gpt")
    context = tokens.shape[1]
    plain = model(tokens)
    for place in range(context):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 3
        moved = (model(changed) - plain).abs().amax((0, 2)) > 0
        assert moved.tolist() == [t >= place for t in range(context)]
        torch.testing.assert_close(model(tokens[:, : place + 1]), plain[:, : place + 1])


def test_root_mean_squares():
    model = reduced("gpt", norm="rms:eps=0.25")
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.norm.weight.uniform_()
    truth = x / (x.square().mean(-1, keepdim=True) + 0.25).sqrt() * model.norm.weight
    torch.testing.assert_close(model.norm(x), truth)
