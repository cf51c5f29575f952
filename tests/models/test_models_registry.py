"""Networks by name: published sizes, weights from the generator only, options and inputs that do not fit."""

import pytest
import torch
from torch import nn

import hesscond
from hesscond.capture import eligible_layers
from hesscond.errors import ConfigError
from hesscond.models import ACTIVATIONS, MODELS, build
from hesscond.models.layers import Layers, glorot_uniform
from hesscond.study.runner import CrossEntropy
from tests.models.reduced import IMAGE, OUTPUTS, REDUCED, batch, reduced

CIFAR, IMAGENET, CLOUD = (3, 32, 32), (3, 224, 224), (1024, 3)
#: Shape, outputs and number of parameters at the published size.
PUBLISHED = {
    "mlp": ((784,), 10, 784 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10),
    "cnn5": (CIFAR, 10, 9 * (3 * 32 + 32 * 64 + 64 * 32) + 128 + 512 * 64 + 64 + 64 * 10 + 10),
    # nine convolutions with batch normalization, one dense layer: no number published
    "cnn9": (CIFAR, 10, 9 * (67 * 64 + 64 * 64 + 192 * 128 + 128 * 128 + 384 * 256 + 256 * 256) + 2 * 1344 + 2570),
    "resnet20": (CIFAR, 10, 269_722),  # 0.27 M
    "resnet56": (CIFAR, 10, 853_018),  # 0.85 M
    "resnet110": (CIFAR, 10, 1_727_962),  # 1.7 M
    "preact-resnet20": (CIFAR, 10, 269_722),
    "preact-resnet56": (CIFAR, 10, 853_018),
    "preact-resnet110": (CIFAR, 10, 1_727_962),  # 1.7 M
    "resnet18": (IMAGENET, 1000, 11_689_512),
    "resnet50": (IMAGENET, 1000, 25_557_032),
    "wrn-28-10": (CIFAR, 10, 36_479_194),  # 36.5 M
    "inception": (CIFAR, 10, 259_338),  # 260 650 with the superfluous biases before its normalizations
    # torchvision's, without its first layers and its dense layer, and with 5 x 5 weights where that has 3 x 3
    "googlenet": (CIFAR, 100, 6_624_904 - 124_736 - 1_025_000 + 16 * 23_808 + (192 * 27 + 384) + 102_500),
    "densenet": (CIFAR, 10, 239_146 - 32),  # without the superfluous bias of its first convolution
    "densenet-bc-100-12": (CIFAR, 10, 769_162),  # 0.77 M
    "vit-s16": (IMAGENET, 1000, 22_050_664),
    "vit-b16": (IMAGENET, 1000, 86_567_656),
    "nerf": ((3,), 4, 60 * 256 + 256 + 6 * (256 * 256 + 256) + 316 * 256 + 256 + 256 * 4 + 4),
    "nerf-rays": ((11,), 3, 2 * 595_844),  # of one network in the published code
    "dgcnn": (CLOUD, 40, 1_809_576),  # 1.81 M
    # in each of 4 blocks 12 d² weights, 9 d biases and two normalizations; embeddings, output, the last normalization
    "gpt": ((64,), 103, 4 * (12 * 128**2 + 13 * 128) + (2 * 103 + 64 + 2) * 128),
}


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.share(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_published_size(name):
    shape, outputs, published = PUBLISHED[name]
    assert size(build(name, input_shape=shape, outputs=outputs)) == published


def test_the_inception_network_has_as_many_parameters_as_published_but_for_biases():
    biased = build("inception", input_shape=CIFAR, outputs=10, norm="none")
    scales_and_shifts = 2 * sum(m.out_channels for m in biased.modules() if isinstance(m, nn.Conv2d))
    assert size(biased) + scales_and_shifts == 260_650


def test_the_small_resnet_with_projections_and_the_cifar_stem():
    resnet = build("resnet20", input_shape=CIFAR, outputs=10, shortcut="projection")
    assert size(resnet) == 272_474
    assert size(build("resnet18", input_shape=CIFAR, outputs=10, stem="3x3")) == 11_173_962


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_finite_and_have_the_shape_and_layers_are_registered_in_the_order_they_are_called(name):
    _, (inputs, _) = batch(name)
    model, called = reduced(name), []
    for layer, module in eligible_layers(model).items():
        module.register_forward_hook(lambda *_, layer=layer: called.append(layer))
    output = model(inputs)
    positions = inputs.shape[1:] if MODELS[name].kind == "tokens" else ()
    assert output.shape == (len(inputs), *positions, OUTPUTS)
    assert output.isfinite().all()
    assert called == list(eligible_layers(model))


@pytest.mark.share(2)
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_from_the_generator_only(name):
    state = torch.get_rng_state()
    first = reduced(name).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        again = reduced(name).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = reduced(name, seed=1)
    layers = eligible_layers(other)
    assert not any(torch.equal(first[f"{layer}.weight"], module.weight) for layer, module in layers.items())
    assert all(parameter.isfinite().all() for parameter in other.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_without_normalization(name):
    model = reduced(name, norm="none")
    kinds = nn.modules.batchnorm._BatchNorm | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm
    assert not [m for m in model.modules() if isinstance(m, kinds)]
    without = [layer for layer, module in eligible_layers(model).items() if module.bias is None]
    assert without == (["fc"] if name == "gpt" else [])
    assert model(batch(name)[1][0]).isfinite().all()


NORMS = {"batch": nn.modules.batchnorm._BatchNorm, "group": nn.GroupNorm, "layer": nn.GroupNorm}
#: Networks, an option of each, and the module that it makes.
CHOICES = [(name, "activation", word, type(make())) for name in MODELS for word, make in ACTIVATIONS.items()]
CHOICES += [
    (name, "norm", word, kind)
    for name in MODELS
    for word, kind in NORMS.items()
    if not name.startswith(("vit", "nerf-rays", "gpt"))
]


@pytest.mark.share(4)
@pytest.mark.parametrize(("name", "option", "word", "kind"), CHOICES)
def test_with_each_activation_and_normalization(name, option, word, kind):
    model = reduced(name, **{option: word})
    assert any(isinstance(module, kind) for module in model.modules())
    assert model(batch(name)[1][0]).isfinite().all()


@pytest.mark.parametrize("name", ["vit-s16", "dgcnn", "gpt"])
def test_dropout_is_off_unless_asked_for(name):
    _, (inputs, _) = batch(name)
    plain, dropping = reduced(name), reduced(name, dropout=0.5)
    assert not any(isinstance(module, nn.Dropout) for module in plain.modules())
    assert torch.equal(plain(inputs), plain(inputs))
    assert not torch.equal(dropping(inputs), dropping(inputs))
    plain.eval()
    dropping.eval()
    dropping.load_state_dict(plain.state_dict())
    assert torch.equal(plain(inputs), dropping(inputs))


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.kind == "image"])
def test_the_smallest_images_fit_and_other_inputs_do_not(name):
    for shape in ((64,), (8, 8), (2, 1, 1), (2, 8, 1), (1, 2, 8, 8)):
        with pytest.raises(ConfigError, match=rf"^model '{name}': this network needs images .* not inputs of shape \("):
            build(name, input_shape=shape, outputs=3)
    shape, options = REDUCED[name]
    for pixels in range(1, shape[1] + 1):
        try:
            model = build(name, input_shape=(shape[0], pixels, pixels), outputs=3, **options)
        except ConfigError:
            continue
        assert model(torch.randn(2, shape[0], pixels, pixels)).isfinite().all()
        return
    pytest.fail("no size fits")


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("resnet21", {}, "unknown model 'resnet21': did you mean resnet20?"),
        ("a network", {}, "unknown model 'a network': choose from cnn5, cnn9"),
        (
            "cnn5",
            {"width": 3},
            "unknown option 'width': choose from widths, padding, pooled, pooling, hidden, head, weights",
        ),
        ("cnn5", {"activation": "swish"}, "unknown activation 'swish': choose from relu"),
        ("cnn5", {"norm": "instance"}, "unknown norm 'instance': choose from batch, group, layer, none"),
        ("cnn5", {"norm": "batch:eps"}, "norm 'batch:eps': eps must be a positive number, got ''"),
        ("cnn5", {"norm": "group:size=2.5"}, "size must be a positive integer, got '2.5'"),
        ("cnn5", {"norm": "group:number=2"}, "'group' has no option 'number', only groups, size, eps"),
        ("cnn5", {"norm": "none:eps=1"}, "'none' has no option 'eps', only its word alone"),
        ("cnn5", {"norm": "group:size=2,groups=3"}, "give either the number of groups or their size, in channels"),
        ("cnn5", {"norm": "group:size=24"}, "the 32 channels of a layer do not split into groups of 24"),
        ("cnn5", {"norm": "group:size=1"}, "the 64 channels .* do not split into groups of 1, of two at least"),
        ("vit-s16", {"patch": 8, "norm": "group:size=4"}, "unknown norm 'group': choose from layer, rms, none"),
        ("resnet20", {"init_scale": 0.0}, "init_scale must be positive, got 0"),
        ("resnet20", {"init_scale": "big"}, "option 'init_scale' must be a number that is not negative, got 'big'"),
        ("cnn5", {"input_shape": (3, 17, 40)}, "images .* of at least 18 x 18 pixels"),
        ("cnn5", {"pooled": (4,)}, "pooled must name convolutions"),
        ("cnn5", {"outputs": 0}, "option 'outputs' must be an integer from 1, got 0"),
        ("cnn5", {"widths": (3, 0, 3)}, "option 'widths' must be a list of positive integers"),
        ("mlp", {"activation": 1}, "option 'activation' must be a word, got 1"),
        ("mlp", {"input_shape": (0,)}, "option 'input_shape' must be a list of positive integers"),
        ("resnet20", {"blocks": (1, 1)}, r"blocks and widths must have one number for each stage, got \[1, 1\]"),
        ("resnet20", {"shortcut": "none"}, "unknown shortcut 'none': choose from pad, projection"),
        ("resnet20", {"widths": (8, 4, 4)}, "padded shortcuts need widths that do not fall, got 8 before 4"),
        ("vit-s16", {"patch": 8, "dropout": 1.0}, "dropout must be a probability from 0 to below 1, got 1.0"),
        ("inception", {"blocks": (3, 1)}, r"blocks must be up to 2, 4 and 2 in the three stages, got \[3, 1\]"),
        ("densenet", {"blocks": ()}, "blocks must have the number of layers of at least one dense block"),
        ("vit-s16", {"patch": 3}, "patches of 3 x 3 pixels do not tile images of 8 x 8"),
        ("vit-s16", {"patch": 8, "heads": 5}, "a multiple of the number of heads, got 384 and 5"),
        ("gpt", {}, r"this network needs sequences of tokens \(context,\), not inputs of shape \(2, 8, 8\)"),
        ("nerf", {}, r"this network needs coordinates of shape \(d,\), not inputs of shape \(2, 8, 8\)"),
        ("nerf", {"input_shape": (2,), "hidden": ()}, "hidden must have the width of at least one layer"),
        ("nerf-rays", {}, r"this network needs rays of shape \(11,\): origin"),
        (
            "nerf-rays",
            {"input_shape": (11,), "samples": (2, 4)},
            r"samples must be the points of the coarse network, 3 at least, and how many more .* got \[2, 4\]",
        ),
        ("nerf-rays", {"input_shape": (11,), "jitter": 2.0}, "jitter be 1 at most, got .* and 2"),
        ("googlenet", {"input_shape": (3, 32, 32), "blocks": (3,)}, r"up to 2, 5 and 2 in the three stages, got \[3\]"),
        ("dgcnn", {}, r"this network needs point clouds \(points, d\) of at least k = 20 points"),
        ("dgcnn", {"input_shape": (20, 3), "widths": ()}, "widths must have the channels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name, change, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        build(name, **{"input_shape": CIFAR if name == "cnn5" else IMAGE, "outputs": 3} | change)
    assert "\n" not in str(caught.value)


def test_options_as_they_come_from_a_file():
    assert isinstance(build("cnn5", input_shape=[2, 8, 8], outputs=3, widths=[3, 4], pooled=[1]), nn.Module)
    assert MODELS["wrn-28-10"].options["widths"] == (160, 320, 640)
    assert "generator" not in MODELS["mlp"].options


def test_the_five_layers_of_the_bnp_paper():
    """TensorFlow's tutorial of 2019, with the paper's widths, written with torch's own modules."""
    model = build("cnn5", input_shape=CIFAR, outputs=10, generator=torch.Generator().manual_seed(0))
    layers = list(eligible_layers(model).values())
    convolutions = [nn.Conv2d(3, 32, 3), nn.Conv2d(32, 64, 3), nn.Conv2d(64, 32, 3)]
    dense = [nn.Linear(512, 64), nn.Linear(64, 10)]
    for own, given in zip([*convolutions, *dense], layers, strict=True):
        own.load_state_dict(given.state_dict())
    a, b, c = convolutions
    sequence = (a, nn.ReLU(), nn.MaxPool2d(2), b, nn.ReLU(), nn.MaxPool2d(2), c, nn.ReLU(), nn.Flatten())
    truth = nn.Sequential(*sequence, dense[0], nn.ReLU(), dense[1])
    images = torch.rand(4, *CIFAR, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(images), truth(images), rtol=0, atol=0)


def test_the_nine_convolutions_of_the_cwo_paper():
    model = build("cnn9", input_shape=CIFAR, outputs=10, generator=torch.Generator().manual_seed(0))
    parts, before = [], 3
    for width in (64, 128, 256):
        for _ in range(3):
            parts += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        parts.append(nn.AvgPool2d(2) if width < 256 else nn.AdaptiveAvgPool2d(1))
    truth = nn.Sequential(*parts, nn.Flatten(), nn.Linear(256, 10))
    truth.load_state_dict(dict(zip(truth.state_dict(), model.state_dict().values(), strict=True)))
    images = torch.rand(4, *CIFAR, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model(images), truth(images))


@pytest.mark.parametrize(
    ("word", "like"),
    [
        ("batch", nn.BatchNorm2d(64)),
        ("batch:eps=0.001,momentum=0.01", nn.BatchNorm2d(64, eps=1e-3, momentum=0.01)),
        ("group:groups=16", nn.GroupNorm(16, 64)),
        ("group:size=4,eps=0.01", nn.GroupNorm(16, 64, eps=0.01)),
        ("group:size=64", nn.GroupNorm(1, 64)),
        ("layer:eps=1e-3", nn.GroupNorm(1, 64, eps=1e-3)),
        ("none", nn.Identity()),
    ],
)
def test_normalizations_with_options(word, like):
    assert repr(Layers(glorot_uniform, None, word).normalization(64)) == repr(like)


@pytest.mark.share(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_output_layer_at_the_published_size(name):
    shape, outputs, _ = PUBLISHED[name]
    generator = torch.Generator().manual_seed(0)
    model = build(name, input_shape=shape, outputs=outputs, generator=generator)
    data = torch.rand(4, *shape, generator=generator), torch.arange(4) % outputs
    if MODELS[name].kind == "tokens":
        tokens = (outputs * data[0]).long()
        data = tokens, tokens.roll(-1, 1)
    if name == "nerf-rays":
        # colours of the coarse network and of the fine one
        data = data[0], data[1][:, None].expand(-1, 2)
    layer = list(eligible_layers(model))[-1]
    kappa = hesscond.probe(model, CrossEntropy(), data, [layer], units=[0])[layer].kappa[0]
    assert 1 <= kappa.lower <= kappa.upper
    assert kappa.lower < float("inf")
