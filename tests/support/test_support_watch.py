"""The callbacks in real trainings of the libraries; each test needs its library."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hesscond
from hesscond.errors import ConfigError
from tests.pretend_device import pretend_device


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_library_that_is_not_installed_is_a_sentence(name, monkeypatch):
    module = f"hesscond.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    for part in ("lightning.pytorch.callbacks", "transformers"):
        monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(ConfigError, match=rf"pip install {name}.* \(extra '{name}'\)"):
        __import__(module)
    monkeypatch.delitem(sys.modules, module, raising=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightning_on_digits(tmp_path):
    L = pytest.importorskip("lightning", reason="needs lightning: pip install lightning (extra 'lightning')")
    from lightning.pytorch.loggers import CSVLogger
    from sklearn.datasets import load_digits

    from hesscond.integrations.lightning import Watch

    digits = load_digits()
    x, y = torch.tensor(digits.data[:300], dtype=torch.float32) / 16, torch.tensor(digits.target[:300])
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=30)

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
            )

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def train(*callbacks):
        torch.manual_seed(0)
        model = Model()
        trainer = L.Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=list(callbacks),
            logger=CSVLogger(tmp_path, name=str(len(callbacks))),
            accumulate_grad_batches=2,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, loader)
        return model.state_dict(), trainer

    callback = Watch(F.cross_entropy, (x[:40], y[:40]), every=3, strict=True)
    alone, _ = train()
    beside, trainer = train(callback)
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
    # ten batches, two to a step, two epochs
    assert trainer.global_step == callback.watch.steps == 10
    frame = callback.watch.to_frame()
    assert list(frame["step"].unique()) == [3, 6, 9]
    assert frame["kappa_own"].notna().all()
    import pandas as pd

    written = pd.read_csv(next((tmp_path / "1").rglob("metrics.csv"))).dropna(subset=["hesscond/step"])
    assert list(written["hesscond/step"]) == [3, 6, 9]
    assert list(written["hesscond/net.0/lambda_max"]) == pytest.approx(
        list(frame.query("layer == 'net.0'")["lambda_max"])
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trainer_on_a_small_gpt2(tmp_path):
    transformers = pytest.importorskip(
        "transformers", reason="needs transformers: pip install transformers accelerate (extra 'transformers')"
    )
    pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate (extra 'transformers')")
    from hesscond.integrations.transformers import Watch

    text = "the condition number of a layer is that of its Hessian, no more and no less. " * 8
    letters = sorted(set(text))
    tokens = torch.tensor([letters.index(one) for one in text])[: 24 * 16].reshape(24, 16)
    data = [{"input_ids": row, "labels": row} for row in tokens]

    def train(*callbacks):
        transformers.set_seed(0)
        config = transformers.GPT2Config(vocab_size=len(letters), n_positions=16, n_embd=8, n_layer=1, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(len(callbacks))),
            max_steps=4,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            warmup_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
        return model, trainer

    batch = {"input_ids": tokens[:4], "labels": tokens[:4]}
    callback = Watch(batch, every=2, layers=["transformer.h.0.mlp.c_fc"], strict=True)
    alone, _ = train()
    beside, trainer = train(callback)
    assert all(torch.equal(one, other) for one, other in zip(alone.parameters(), beside.parameters(), strict=True))
    rows = [row for row in trainer.state.log_history if "hesscond/step" in row]
    assert [row["step"] for row in rows] == [2, 4]
    # the linear schedule ends with a rate of 0
    assert rows[0]["hesscond/sharpness_times_rate"] > 0
    # the watch draws dropout with its seed, 0
    torch.manual_seed(0)
    found = hesscond.probe(
        beside, lambda output, _: output.loss, batch, layers=["transformer.h.0.mlp.c_fc"], level="layer", rtol=1e-6
    )
    assert rows[-1]["hesscond/transformer.h.0.mlp.c_fc/lambda_max"] == pytest.approx(
        found["transformer.h.0.mlp.c_fc"].kappa.lambda_max, rel=1e-6
    )


def called_back(name, where):
    """Rows of a callback in the order of calls of its library, whose trainers know real devices only."""
    Callback = importlib.import_module(f"hesscond.integrations.{name}").Watch
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(where)
    model.device = torch.device(where)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    own = SimpleNamespace(loggers=[], optimizers=[optimizer], global_step=0, log_history=[])
    # the probe batch is on the host
    callback = Callback(loss_fn=nn.CrossEntropyLoss(), probe_batch=(x, y), every=2)
    if name == "lightning":
        callback.on_train_start(own, model)
    else:
        callback.on_train_begin(None, own, None, model=model, optimizer=optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(where)), y.to(where))
        loss.backward()
        optimizer.step()
        own.global_step += 1
        if name == "lightning":
            callback.on_train_batch_end(own, model, {"loss": loss}, None, 0)
        else:
            callback.on_step_end(None, own, None)
    frame = callback.watch.to_frame()
    return frame[[column for column in frame.select_dtypes("number") if "second" not in column]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_callbacks_have_the_same_bits_on_a_device(name):
    try:
        importlib.import_module(f"hesscond.integrations.{name}")
    except ConfigError as error:
        pytest.skip(str(error))
    with pretend_device():
        here, there = (called_back(name, where) for where in ("cpu", "pretend"))
    assert len(here)
    assert here.equals(there)
