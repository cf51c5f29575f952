"""Training with and without a watch is the same, bit for bit, in loops of different kinds."""

import copy
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from tests.catalogue.parts import by_token

STEPS = 6


def batches(seed=3, features=6, classes=3, samples=10):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield (
            torch.randn(samples, features, generator=generator),
            torch.randint(classes, (samples,), generator=generator),
        )


def dense(*extra):
    return nn.Sequential(nn.Linear(6, 5), *extra, nn.Tanh(), nn.Linear(5, 3))


def loop(step, model, optimizer, *, change=None, clip=False, then=(), recording=True):
    """A training as one writes it; ``change`` of the inputs, and what is called behind each step of the optimizer."""
    with step(model, optimizer) as after:
        for x, y in batches():
            x = x if change is None else change(x)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            for call in then:
                call()
            with torch.set_grad_enabled(recording):
                after()
    return model, optimizer


def plain(step):
    model = dense()
    return loop(step, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def batch_normalization(step):
    """Between two steps the model is evaluated, and trained on."""
    model = dense(nn.BatchNorm1d(5))

    @torch.no_grad()
    def evaluate():
        model.eval()(next(batches())[0])
        model.train()

    return loop(step, model, torch.optim.Adam(model.parameters(), lr=0.01), then=[evaluate])


def dropout_and_noise(step):
    """All three global generators are drawn from."""
    model = dense(nn.Dropout(0.4))

    def noisy(x):
        return x + 0.1 * torch.randn_like(x) + random.random() + np.random.rand()  # noqa: NPY002

    return loop(step, model, torch.optim.RMSprop(model.parameters(), lr=0.01), change=noisy)


def accumulation(step):
    """Gradients that are kept over a step, and the watch in the middle of them."""
    model = dense()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with step(model, optimizer) as after:
        for number, (x, y) in enumerate(batches()):
            (F.cross_entropy(model(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            after()
    return model, optimizer


def mixed_precision(step):
    """Autocast is on where the watch steps, and the scaler knows of no other gradients."""
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with step(model, optimizer) as after:
        for x, y in batches():
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                after()
                assert torch.is_autocast_enabled("cpu")
    return model, optimizer


def schedule_and_clipping(step):
    """A warm-up that begins with a rate of 0."""
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1.0, k / 3))
    return loop(step, model, optimizer, clip=True, then=[schedule.step])


def closures(step):
    """No reader knows L-BFGS: the watch has no optimizer."""
    model = dense()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with step(model, None) as after:
        for x, y in batches():

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            after()
    return model, optimizer


def frozen(step):
    """Parameters that require no gradient, and a watch that steps while none is recorded."""
    model = dense()
    model[2].bias.requires_grad_(False)
    optimizer = torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return loop(step, model, optimizer, recording=False)


def transformer(step):
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Embedding(11, 8), block, nn.Linear(8, 11))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(11, (4, 6), generator=generator) for _ in range(STEPS)]
    with step(model, optimizer, batch=(data[0][:, :-1], data[0][:, 1:]), loss=by_token) as after:
        for tokens in data:
            optimizer.zero_grad()
            by_token(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
            after()
    return model, optimizer


LOOPS = [
    plain,
    batch_normalization,
    dropout_and_noise,
    accumulation,
    mixed_precision,
    schedule_and_clipping,
    closures,
    frozen,
    transformer,
]


class Stepping:
    """A context in which the watch, if there is one, steps; it is closed behind it."""

    def __init__(self, watch=None):
        self.watch = watch

    def __enter__(self):
        return self.watch.step if self.watch else lambda: None

    def __exit__(self, *error):
        if self.watch:
            self.watch.close()


def state(model, optimizer):
    """All that a training has, and all random states."""
    return {
        "model": {name: value.clone() for name, value in model.state_dict(keep_vars=False).items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "required": [p.requires_grad for p in model.parameters()],
        "mode": [module.training for module in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "recording": torch.is_grad_enabled(),
    }


def same(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def trained(loop, step):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    return state(*loop(step))


CASES = [(loop, "layer") for loop in LOOPS] + [(plain, "network"), (batch_normalization, "unit"), (transformer, "unit")]


@pytest.mark.share(2)
@pytest.mark.parametrize(("loop", "level"), CASES, ids=[f"{loop.__name__}-{level}" for loop, level in CASES])
def test_a_watched_training_is_the_same_bit_for_bit(loop, level):
    watches = []

    def watched(model, optimizer, batch=None, loss=F.cross_entropy):
        own = hesscond.watch(
            model, loss, batch or next(batches(seed=7)), optimizer, every=2, level=level, strict=True, memory=1e9
        )
        watches.append(own)
        return Stepping(own)

    alone = trained(loop, lambda *model, **options: Stepping())
    beside = trained(loop, watched)
    assert same(alone, beside)
    frame = watches[0].to_frame()
    assert set(frame["step"]) == {2, 4, 6}
    assert (frame["kappa_lower"] >= 1).all()
    if loop is not closures:
        assert frame["kappa_own"].notna().any()


def replica(rank, watching, folder):
    """A process of two that train together."""
    store = torch.distributed.FileStore(f"{folder}/store-{watching}", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = nn.parallel.DistributedDataParallel(dense(nn.BatchNorm1d(5)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        own = None
        if watching:
            group = torch.distributed.group.WORLD if watching == "all" else None
            x, y = next(batches(seed=7 + rank))
            own = hesscond.watch(model, F.cross_entropy, (x, y), optimizer, every=2, strict=True, group=group)
        rows = []
        for x, y in batches(seed=3 + rank):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            rows.append(own.step() if own else None)
        torch.save((state(model, optimizer), rows), f"{folder}/{watching}-{rank}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("watching", ["first", "all"])
def test_two_processes_train_as_without_a_watch(watching, tmp_path):
    for kind in ("", watching):
        torch.multiprocessing.spawn(replica, (kind, str(tmp_path)), nprocs=2)
    for rank in range(2):
        alone, _ = torch.load(tmp_path / f"-{rank}", weights_only=False)
        beside, rows = torch.load(tmp_path / f"{watching}-{rank}", weights_only=False)
        assert same(alone, beside)
        measured = [row is not None for row in rows]
        assert measured == [(watching == "all" or rank == 0) and step % 2 == 0 for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_trains_as_without_a_watch():
    watches = []

    def train(step):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = torch.compile(dense())
        return state(*loop(step, model, torch.optim.Adam(model.parameters(), lr=0.01)))

    def watched(model, optimizer):
        watches.append(hesscond.watch(model, F.cross_entropy, next(batches(seed=7)), optimizer, every=2, strict=True))
        return Stepping(watches[0])

    assert same(train(lambda *model: Stepping()), train(watched))
    assert list(watches[0].to_frame()["step"].unique()) == [2, 4, 6]
