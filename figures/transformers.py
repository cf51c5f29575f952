"""What the blocks of a small GPT are like along training: ``python figures/transformers.py --out FOLDER [--seeds N]``.

The study chargpt at small scale with layer normalization is trained by AdamW; at the start, after a tenth, at half and
at the end every unit of every block is measured on four windows of the training text: trace, both ends of the spectrum,
κ with its bounds, rank, negative eigenvalues. Beside them λ_max of whole blocks, how much of the Hessian lies on the
diagonal of its blocks, and, at the start, the same λ_max of a fully connected and a convolutional network.

The folder keeps what was measured, so that the command goes on where it was stopped; at the end it writes the files
that the tables of docs/transformers.md come from (transformers-NAME.csv) and its figure (transformers.png, .pdf).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import nn

import hesscond
from hesscond.hessians import HessianOperator, role
from hesscond.hessians.catalogue import Catalogue
from hesscond.methods import parse
from hesscond.models import build
from hesscond.report import Page, save_figure
from hesscond.study import StudyConfig, load_data, load_study
from hesscond.study.runner import LOSSES

#: Shares of the training at which the network is measured.
MOMENTS = {"start": 0.0, "10 %": 0.1, "50 %": 0.5, "end": 1.0}
#: Windows of text, or samples, in the batch that is measured.
WINDOWS, SAMPLES = 4, 128
#: Random signs for each block whose part of ‖H‖²_F is estimated.
SIGNS = 30
#: The kinds of Wang et al., in the order of their claim, and the kinds of blocks in them.
FAMILIES = {
    "embedding": ("embedding",),
    "query, key": ("query", "key"),
    "feed-forward": ("mlp in", "mlp out"),
    "value, output": ("value", "attention output"),
    "norm": ("norm",),
}
#: Networks that block heterogeneity is compared with, at the start.
OTHERS = {
    "fully connected (fc-digits)": {},
    "convolutional (ResNet-20)": {"model": {"name": "resnet20"}},
}


def network(study: StudyConfig, seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network of a study as a run with this seed begins, and the training set."""
    data = load_data(study.data)
    inputs = data.train_inputs
    assert isinstance(inputs, torch.Tensor)
    if study.model.architecture.kind == "vector":
        inputs = inputs.flatten(1)
    torch.manual_seed(seed)
    model = build(
        study.model.name,
        input_shape=data.form.input_shape,
        outputs=data.form.outputs,
        generator=torch.Generator().manual_seed(seed),
        **study.model.options,
    )
    return model, inputs, data.train_targets


def trained(study: StudyConfig, spec: str, rate: float, seed: int) -> Iterator[tuple[int, nn.Module, float]]:
    """A run of the study: the iteration, the network, and the loss of the batch before it; for every iteration."""
    model, inputs, targets = network(study, seed)
    method = parse(spec).create(model)
    optimizer = method.optimizer(rate, **study.training.optimizer_options)
    size, iterations = study.training.batch_size, study.training.iterations or 0
    per_epoch = len(targets) // size
    schedule = study.schedule.scheduler(optimizer, per_epoch=per_epoch, iterations=iterations)
    order, loss_fn, loss = torch.Generator().manual_seed(seed + 1), LOSSES[study.training.loss](), float("nan")
    for iteration in range(iterations + 1):
        yield iteration, model, loss
        if iteration % per_epoch == 0:
            permutation = torch.randperm(len(targets), generator=order)
        position = iteration % per_epoch
        chosen = permutation[position * size : (position + 1) * size]
        optimizer.zero_grad(set_to_none=True)
        batch_loss = loss_fn(model(inputs[chosen]), targets[chosen])
        batch_loss.backward()
        optimizer.step()
        method.after_step()
        if schedule is not None:
            schedule.step()
        loss = float(batch_loss.detach())


def measured(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], loss_fn: nn.Module) -> pd.DataFrame:
    """One row for every unit of every block."""
    blocks, rows = hesscond.probe(model, loss_fn, batch, "*"), []
    for name in blocks:
        result = blocks[name]
        for unit, kappa in zip(result.units, result.kappa, strict=True):
            block_role = role(model, name)
            rows.append(
                {
                    "block": name,
                    "kind": block_role.kind,
                    "depth": block_role.depth,
                    "unit": unit,
                    "n_params": result.n_params,
                    "trace": float(result.block(unit).diagonal().sum()),
                    "lambda_max": kappa.lambda_max,
                    "lambda_min": kappa.lambda_min,
                    "kappa": kappa.value,
                    "lower": kappa.lower,
                    "upper": kappa.upper,
                    "rank": kappa.rank,
                    "negative": kappa.negative,
                    "resolved": kappa.resolved,
                    "check": result.check.difference,
                }
            )
    return pd.DataFrame(rows)


def largest(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], loss_fn: nn.Module, *, weights: bool = False
) -> pd.DataFrame:
    """λ_max of every whole block, or of dense and convolutional layers only, and the bound of its error."""
    rows = []
    for name, block in Catalogue(model).natural.items():
        if weights and block.layer is None:
            continue
        H = HessianOperator(model, loss_fn, batch, parameters=list(block.parameters))
        top = hesscond.lanczos(H, tol=1e-4)
        block_role = role(model, name)
        rows.append(
            {
                "block": name,
                "kind": block_role.kind,
                "depth": block_role.depth,
                "n_params": H.order,
                "lambda_max": float(top.eigenvalues[0]),
                "error": float(top.upper[0] - top.lower[0]) / 2,
            }
        )
    return pd.DataFrame(rows)


def others(seed: int) -> pd.DataFrame:
    """λ_max of the weight matrices and kernels of networks of other kinds, at their start."""
    tables, study = [], load_study("fc-digits")
    for name, changes in OTHERS.items():
        config = StudyConfig.model_validate({**study.model_dump(mode="json", exclude_none=True), **changes})
        model, inputs, targets = network(config, seed)
        table = largest(model, (inputs[:SAMPLES], targets[:SAMPLES]), LOSSES[config.training.loss](), weights=True)
        tables.append(table.assign(network=name, seed=seed))
    return pd.concat(tables)


def structure(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], loss_fn: nn.Module) -> pd.DataFrame:
    """How much of ‖H‖²_F lies on the diagonal of the layers, and of the Hessian of a layer on that of its rows."""
    H = HessianOperator(model, loss_fn, batch)
    numbers = H.unflatten(torch.arange(H.order))
    layers: dict[str, list[torch.Tensor]] = {}
    for name, indices in numbers.items():
        layers.setdefault(name.rpartition(".")[0], []).append(indices.flatten())
    share, error = on_diagonal(H, [torch.cat(tensors) for tensors in layers.values()])
    rows = [{"of": "network", "by": "layers", "share": share, "error": error}]
    for name in ("fc", "block1.fc1", "block1.attention.q", "block1.attention.v"):
        H = HessianOperator(model, loss_fn, batch, layers=[name])
        places = H.unflatten(torch.arange(H.order)).values()
        share, error = on_diagonal(H, list(torch.cat([tensor.reshape(len(tensor), -1) for tensor in places], 1)))
        rows.append({"of": name, "by": "rows", "share": share, "error": error})
    return pd.DataFrame(rows)


def on_diagonal(H: HessianOperator, blocks: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Share of ‖H‖²_F on the diagonal of blocks of indices, and its standard error, from random signs in each block."""
    generator, inside, whole = torch.Generator().manual_seed(0), [], []
    for block in blocks:
        signs = torch.zeros(H.order, SIGNS, dtype=H.dtype)
        signs[block] = torch.randint(0, 2, (len(block), SIGNS), generator=generator).to(H.dtype).mul_(2).sub_(1)
        # E ‖(Hv)_b‖² = ‖H_ba‖²_F
        squares = torch.cat([H.multiply(part) for part in signs.split(10, 1)], 1).square()
        inside.append(squares[block].sum(0))
        whole.append(squares.sum(0))
    part, total = torch.stack(inside), torch.stack(whole)
    share = part.mean(1).sum() / total.mean(1).sum()
    variance = ((part - share * total).var(1) / SIGNS).sum()
    return float(share), float(variance.sqrt() / total.mean(1).sum())


def measure(folder: Path, seeds: int) -> None:
    """Train, and write what is not there yet."""
    study = load_study("chargpt", scale="small").variant("LN")
    loss_fn = LOSSES[study.study.training.loss]()
    iterations = study.study.training.iterations or 0
    moments = {round(share * iterations): name for name, share in MOMENTS.items()}
    for seed in range(seeds):
        path = folder / f"others-{seed}.csv"
        if not path.exists():
            others(seed).to_csv(path, index=False)
        if (folder / f"largest-{seed}-{iterations}.csv").exists():
            continue
        rate = study.study.learning_rate("LN", study.study.training.batch_size)
        _, inputs, targets = network(study.study, seed)
        batch = inputs[:WINDOWS], targets[:WINDOWS]
        for iteration, model, loss in trained(study.study, study.method, rate, seed):
            if iteration not in moments:
                continue
            for what, measure_it in {"units": measured, "largest": largest, "structure": structure}.items():
                path = folder / f"{what}-{seed}-{iteration}.csv"
                if not path.exists():
                    table = measure_it(model, batch, loss_fn)
                    table.assign(seed=seed, iteration=iteration, moment=moments[iteration]).to_csv(path, index=False)
            print(f"seed {seed}, iteration {iteration}: loss {loss:.3f}", flush=True)


def read(folder: Path, what: str) -> pd.DataFrame:
    """All tables of a kind."""
    return pd.concat([pd.read_csv(path) for path in sorted(folder.glob(f"{what}-*.csv"))], ignore_index=True)


def in_family(kind: str) -> str:
    """The family of Wang et al. that a kind of block belongs to; empty: none."""
    return next((family for family, kinds in FAMILIES.items() if kind in kinds), "")


def sharpness(units: pd.DataFrame, largest_of: pd.DataFrame) -> pd.DataFrame:
    """Average sharpness tr H / n by family, moment and seed: exact traces, over all parameters of the blocks."""
    at = ["seed", "moment", "family"]
    units, sizes = (frame.assign(family=frame["kind"].map(in_family)) for frame in (units, largest_of))
    averages = units.groupby(at)["trace"].sum() / sizes.groupby(at)["n_params"].sum()
    return averages.rename("sharpness").reset_index().query("family != ''")


def conditions(units: pd.DataFrame) -> pd.DataFrame:
    """By family, or kind, and moment: medians over units and seeds, and how many were resolved."""
    family = units["kind"].map(in_family)
    kappa = units["kappa"].where(units["resolved"])
    units = units.assign(family=family.where(family != "", units["kind"]), kappa=kappa)
    groups = units.groupby(["family", "moment"])
    return pd.DataFrame(
        {
            "units": groups.size(),
            "resolved": groups["resolved"].sum(),
            "kappa": groups["kappa"].median(),
            "worst": groups["kappa"].max(),
            "rank": groups.apply(lambda group: (group["rank"] / group["n_params"]).median(), include_groups=False),
            "negative": groups.apply(lambda group: group["negative"].sum() / group["rank"].sum(), include_groups=False),
            "difference": groups["check"].max(),
        }
    ).reset_index()


def spread(table: pd.DataFrame, by: list[str]) -> pd.Series:
    """The largest λ_max of a weight matrix over the smallest."""
    weights = table[~table["kind"].isin(["norm", "embedding", "position", "class token"])]
    groups = weights.groupby(by)["lambda_max"]
    return groups.max() / groups.min()


def heterogeneity(every: pd.DataFrame) -> pd.DataFrame:
    """The ratio of λ_max of each network, with all weight matrices, without the head, and without query and key too."""
    left_out = {"all": [], "without_head": ["head"], "without_head_query_key": ["head", "query", "key"]}
    at = ["network", "seed", "moment"]
    return pd.DataFrame({name: spread(every[~every["kind"].isin(out)], at) for name, out in left_out.items()})


def summarize(folder: Path) -> None:
    """Write the files that the tables of docs/transformers.md come from."""
    units, top = read(folder, "units"), read(folder, "largest")
    every = pd.concat([top.assign(network="GPT"), read(folder, "others").assign(moment="start")])
    files = {
        "sharpness": sharpness(units, top),
        "kappa": conditions(units),
        "heterogeneity": heterogeneity(every).reset_index(),
        "rows": read(folder, "structure")[["of", "by", "seed", "moment", "share", "error"]],
    }
    for name, frame in files.items():
        frame.to_csv(folder / f"transformers-{name}.csv", index=False, float_format="%.4g", lineterminator="\n")


def drawn(folder: Path) -> None:
    """Draw tr H / n, λ_max of units and κ of units by family along the training."""
    units, averages = read(folder, "units"), sharpness(read(folder, "units"), read(folder, "largest"))
    units = units.assign(family=units["kind"].map(in_family), kappa=units["kappa"].where(units["resolved"]))
    page = Page(7.2)
    with page.styled():
        figure = page.figure(2.6)
        paint(figure, units, averages)
        save_figure(figure, folder / "transformers.png")


def paint(figure: Figure, units: pd.DataFrame, averages: pd.DataFrame) -> None:
    """The three panels."""
    panels = figure.subplots(1, 3)
    where = dict(zip(MOMENTS, range(len(MOMENTS)), strict=True))
    colors = dict(zip(FAMILIES, ["#E69F00", "#0072B2", "#009E73", "#D55E00", "#555555"], strict=True))
    for family, color in colors.items():
        members = units[units["family"] == family]
        for panel, groups, quantile in (
            (panels[0], averages[averages["family"] == family].groupby("moment")["sharpness"], (0.0, 0.5, 1.0)),
            (panels[1], members.groupby("moment")["lambda_max"], (0.25, 0.5, 0.75)),
            (panels[2], members.groupby("moment")["kappa"], (0.25, 0.5, 0.75)),
        ):
            values = groups.quantile(quantile).unstack().reindex(list(MOMENTS))
            # traces of both signs, as at the start, have no place on a logarithmic axis
            values = values.where(values[quantile[0]] > 0)
            x = [where[name] for name in values.index]
            panel.plot(x, values[0.5], color=color, marker="o", markersize=3, label=family)
            panel.fill_between(x, values[quantile[0]], values[quantile[2]], color=color, alpha=0.15, linewidth=0)
    for panel, title in zip(panels, ["tr H / n of blocks", "λ_max of units", "κ of units"], strict=True):
        panel.set_yscale("log")
        panel.set_xticks(list(where.values()), list(where))
        panel.set_title(title, loc="left")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)


def main() -> None:
    """Measure, then write files and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    measure(arguments.out, arguments.seeds)
    summarize(arguments.out)
    drawn(arguments.out)


if __name__ == "__main__":
    main()
