"""Seeds at batch size 1 or 2 at once: ``python figures/side_by_side.py PANEL METHOD SEED … --out FILE``, at the root.

At these sizes most of an iteration is the overhead of its operations. Here the networks, their methods and updates are
written out for several seeds at once, and compiled; initial weights, batches and rates are those of
``hesscond replicate``. No operation mixes seeds, so every seed takes the steps of its own run, up to rounding:
``--check N`` compares N iterations, and the test losses after them, with those runs in float64. A call that was broken
off goes on from its file with the ending .pt.

K seeds, batches of N samples: activations are (K, N, height, width, channels), weights (K, units, height, width,
channels), those of dense layers (K, units, inputs).
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from small_comparisons import COLUMNS
from torch.nn import functional

from hesscond.errors import ConfigError
from hesscond.study import RunPlan, load_data
from hesscond.study.grid import Overrides
from hesscond.study.replication import plan_replication, replication
from hesscond.study.runner import build_model, rehearsal

CHUNK, SAVE_SECONDS = 50, 300
EPS, MOMENTUM = 1e-3, 0.01
#: Options of 4 Things, BNP and Adam.
GROUPS, EXAMPLE_WEIGHT, DECAY = 8, 0.05, 1e-4
EPSILON_1, EPSILON_2, RHO = 1e-2, 1e-4, 0.99
BETA_1, BETA_2, ADAM_EPS = 0.9, 0.999, 1e-8
#: Panels of small batches that take hours by themselves, as study/panel.
PANELS = ("bnp-figure-5/batch-2", "bnp-figure-4/fc-batch-1", "bnp-figure-4/fc-batch-1-standardized")
#: Output positions of the convolutions.
POSITIONS = (900, 169, 16)
#: Running statistics of each layer's input by method, and the values that they start from.
STATISTICS: dict[str, dict[str, float]] = {
    "vanilla": {},
    "BN": {"mean": 0.0, "variance": 1.0},
    "BRN": {"mean": 0.0, "std": 0.0, "moving_mean": 0.0, "moving_variance": 1.0},
    "4 Things": {"mean": 0.0, "square": 1.0},
    "LN": {},
    "BNP": {"mu": 0.0, "variance": 1.0},
}

Tensors = dict[str, torch.Tensor]
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def convolved(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, pooled: bool) -> torch.Tensor:
    """ReLU of a 3 × 3 convolution without padding, and of the largest in every 2 × 2 of it."""
    seeds, samples, side = h.shape[0], h.shape[1], h.shape[2] - 2
    # the windows (K, N, y, x, C, 3, 3); those of an odd last row or column enter no pool
    windows = h.unfold(2, 3, 1).unfold(3, 3, 1)
    if pooled:
        side //= 2
        windows = windows[:, :, : 2 * side, : 2 * side].unflatten(3, (side, 2)).unflatten(2, (side, 2))
        windows = windows.permute(0, 3, 5, 1, 2, 4, 7, 8, 6)
    else:
        windows = windows.permute(0, 1, 2, 3, 5, 6, 4)
    products = torch.bmm(windows.reshape(seeds, -1, weight[0, 0].numel()), weight.flatten(2).mT)
    if pooled:
        a, b, c, d = products.unflatten(1, (4, -1)).unbind(1)
        products = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
    return torch.relu(products + bias[:, None]).view(seeds, samples, side, side, -1)


def dense(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Outputs (K, N, units) of a dense layer."""
    # torch.compile leaves this to BLAS, also for a single sample, of which it would write products out, slower
    return torch.baddbmm(bias[:, None], h, weight.mT)


def layers_of(tensors: Tensors, kind: str = "weight") -> list[str]:
    """Names of the layers, in order, from their tensors of a kind."""
    return [key.removesuffix(f".{kind}") for key in tensors if key.endswith(f".{kind}") and not key[0].isdigit()]


def network(weights: Tensors, images: torch.Tensor, enter: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Outputs (K, N, classes); ``enter`` changes what enters layer i."""
    h, layers = images, layers_of(weights)
    for i, name in enumerate(layers):
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        if weight.ndim > 3:
            h = convolved(enter(i, h), weight, bias, pooled=i < 2)
            continue
        if h.ndim > 3:
            h = h.permute(0, 1, 4, 2, 3).flatten(2)
        h = dense(enter(i, h), weight, bias)
        if i < len(layers) - 1:
            h = torch.relu(h)
    return h


def normalizes(name: str, i: int) -> bool:
    """Whether a method normalizes what enters layer i."""
    return name not in ("vanilla", "BNP") and i > 0


def moments(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance (K, C) of each channel over samples and positions."""
    variance, mean = torch.var_mean(h, list(range(1, h.ndim - 1)), correction=0)
    return mean, variance


def beside(values: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Values (K, C) in a shape that broadcasts to activations."""
    return values.view(len(values), *[1] * (h.ndim - 2), -1)


def normalized(h: torch.Tensor, *of: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """γ (h − μ) / √(σ² + ε) + β with μ, σ², γ, β (K, C)."""
    mean, variance, weight, bias = (beside(part, h) for part in of)
    return weight * ((h - mean) * torch.rsqrt(variance + eps)) + bias


def by_sample(h: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Layer normalization of features (K, N, C)."""
    variance, mean = torch.var_mean(h, 2, correction=0, keepdim=True)
    return beside(weight, h) * ((h - mean) * torch.rsqrt(variance + EPS)) + beside(bias, h)


def by_group(h: torch.Tensor) -> torch.Tensor:
    """Activations with their channels in groups, (K, N, G, values)."""
    grouped = h.unflatten(-1, (GROUPS, -1))
    return grouped if h.ndim == 3 else grouped.permute(0, 1, 4, 2, 3, 5).flatten(3)


def spread(values: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Values (K, N, G) in a shape that broadcasts to activations."""
    channels = values.repeat_interleave(h.shape[-1] // GROUPS, 2)
    return channels if h.ndim == 3 else channels[:, :, None, None]


def trained_input(name: str, i: int, h: torch.Tensor, weights: Tensors, state: Tensors, clock: torch.Tensor) -> Any:
    """Input of layer i as the method normalizes it in training, and the new running statistics."""
    if not normalizes(name, i):
        return h, {}
    weight, bias = weights[f"{i}.weight"], weights[f"{i}.bias"]
    if name == "LN":
        return by_sample(h, weight, bias), {}
    values = h.detach()
    if name == "4 Things":
        grouped = by_group(h)
        variance, mean = torch.var_mean(grouped, (1, 3), correction=0, keepdim=True)
        scale = spread(torch.rsqrt(variance + EPS)[..., 0], h)
        out = (h - spread(mean[..., 0], h)) * scale * beside(weight, h) + beside(bias, h)
        new = {f"{i}.mean": moments(values)[0], f"{i}.square": moments(values.square())[0]}
        return out, {key: state[key].lerp(value, MOMENTUM) for key, value in new.items()}
    mean, variance = moments(h)
    fixed_mean, fixed_variance = mean.detach(), variance.detach()
    if name == "BN":
        count = h.shape[1:-1].numel()
        # TensorFlow's: unbiased after convolutions
        running = fixed_variance * (count / (count - 1)) if h.ndim > 3 else fixed_variance
        new = {f"{i}.mean": fixed_mean, f"{i}.variance": running}
        out = normalized(h, mean, variance, weight, bias)
        return out, {key: state[key].lerp(value, MOMENTUM) for key, value in new.items()}
    # BRN; clock: weight of all batches before this one, share of this one
    std = (fixed_variance + EPS).sqrt()
    mu, sigma = (torch.lerp(v, state[f"{i}.{key}"], clock[0]) for v, key in ((fixed_mean, "mean"), (std, "std")))
    r, d = std / sigma, (fixed_mean - mu) / sigma
    new_mean, new_std = (state[f"{i}.{key}"].lerp(v, clock[1]) for v, key in ((fixed_mean, "mean"), (std, "std")))
    new = {
        f"{i}.mean": new_mean,
        f"{i}.std": new_std,
        f"{i}.moving_mean": state[f"{i}.moving_mean"].lerp(new_mean, MOMENTUM),
        f"{i}.moving_variance": state[f"{i}.moving_variance"].lerp(new_std.square() - EPS, MOMENTUM),
    }
    return normalized(h, mean, variance, weight * r, torch.addcmul(bias, weight, d)), new


def tested_input(name: str, i: int, h: torch.Tensor, weights: Tensors, state: Tensors) -> torch.Tensor:
    """Input of layer i as the method normalizes it at inference."""
    if not normalizes(name, i):
        return h
    affine = weights[f"{i}.weight"], weights[f"{i}.bias"]
    if name == "LN":
        return by_sample(h, *affine)
    if name == "4 Things":
        grouped, mixed = by_group(h), []
        for key, powers in (("mean", grouped), ("square", grouped.square())):
            running = state[f"{i}.{key}"].unflatten(1, (GROUPS, -1)).mean(2)
            mixed.append(torch.lerp(running[:, None], powers.mean(3), EXAMPLE_WEIGHT))
        variance = (mixed[1] - mixed[0].square()).clamp_min(0)
        out = (h - spread(mixed[0], h)) * spread(torch.rsqrt(variance + EPS), h)
        return out * beside(affine[0], h) + beside(affine[1], h)
    of = ("mean", "variance") if name == "BN" else ("moving_mean", "moving_variance")
    return normalized(h, *(state[f"{i}.{key}"] for key in of), *affine)


def preconditioned(gradients: Tensors, inputs: Sequence[torch.Tensor], state: Tensors) -> tuple[Tensors, Tensors]:
    """BNP's gradients, and its new statistics; of a single sample also the factors that its inputs become in them."""
    new, out = {}, dict(gradients)
    for i, (name, h) in enumerate(zip(layers_of(gradients, "bias"), inputs, strict=True)):
        samples, flat = h.shape[1], h.ndim == 3
        seen, seen_variance = moments(h)
        single = h.shape[1:-1].numel() == 1
        if single:
            seen_variance = (seen - state[f"{i}.mu"]).square()
        mean = state[f"{i}.mu"].lerp(seen, 1 - RHO)
        variance = state[f"{i}.variance"].lerp(seen_variance, 1 - RHO)
        new |= {f"{i}.mu": mean, f"{i}.variance": variance}
        fan_in = h.shape[-1] * (1 if flat else 9)
        q_squared = max(fan_in / samples, 1.0 if flat else POSITIONS[i] ** 0.5)
        inverse = 1 / (q_squared * (variance + (EPSILON_1 * variance.amax(1, keepdim=True) + EPSILON_2)))
        bias = gradients[f"{name}.bias"]
        if single:
            new[f"{i}.factor"] = factor = (seen - mean) * inverse
            out[f"{name}.bias"] = bias * (1 / q_squared - (factor * mean).sum(1, keepdim=True))
            continue
        weight = gradients[f"{name}.weight"]
        mu = beside(mean, weight)
        weight = (weight - bias.view(*bias.shape, *[1] * (weight.ndim - 2)) * mu) * beside(inverse, weight)
        out[f"{name}.weight"] = weight
        out[f"{name}.bias"] = bias / q_squared - (weight * mu).flatten(2).sum(2)
    return out, new


def step_of(name: str, rate: float) -> Callable[..., tuple[torch.Tensor, Factors]]:
    """One iteration of all seeds, in place: their losses (K,), and of a single sample the gradients of the weights.

    These are outer products (K, units) ⊗ (K, inputs), by layer, and are left to be subtracted.
    """

    def step(
        weights: Tensors, state: Tensors, images: torch.Tensor, targets: torch.Tensor, clock: torch.Tensor
    ) -> tuple[torch.Tensor, Factors]:
        single = images.shape[1] == 1
        # of a single sample the gradient of a bias is a factor of that of its weight
        fixed = {key: weight for key, weight in weights.items() if single and weight.ndim == 3}

        def objective(trained: Tensors) -> Any:
            inputs, new = [], {}
            values = {key: trained.get(key, weight) for key, weight in weights.items()}

            def enter(i: int, h: torch.Tensor) -> torch.Tensor:
                out, statistics = trained_input(name, i, h, values, state, clock)
                inputs.append((out if name == "LN" else h).detach())
                new.update(statistics)
                return out

            outputs = network(values, images, enter)
            each = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
            losses = each.view(targets.shape).mean(1)
            total = losses.sum()
            if name == "4 Things":
                for i in range(1, len(layers_of(values))):
                    decayed = (values[f"{i}.weight"] - 1).square().sum() + values[f"{i}.bias"].square().sum()
                    total = total + DECAY / 2 * decayed
            return total, (losses.detach(), inputs, new)

        differentiated = {key: weight for key, weight in weights.items() if key not in fixed}
        gradients, (losses, inputs, new) = torch.func.grad(objective, has_aux=True)(differentiated)
        slopes = gradients
        if name == "BNP":
            gradients, new = preconditioned(gradients, inputs, state)
        layers = [key.removesuffix(".weight") for key in fixed]
        outer = {
            layer: (slopes[f"{layer}.bias"], new.pop(f"{i}.factor", inputs[i][:, 0])) for i, layer in enumerate(layers)
        }
        for key, value in new.items():
            state[key].copy_(value)
        for key, gradient in gradients.items():
            if name == "4 Things":
                # clock: bias corrections of Adam
                first, second = state[f"{key}.first"], state[f"{key}.second"]
                first.lerp_(gradient, 1 - BETA_1)
                second.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
                weights[key].sub_(rate * (first / clock[0]) / (second.sqrt() / clock[1] + ADAM_EPS))
            else:
                weights[key].sub_(rate * gradient)
        return losses, outer

    return step


def plans_of(name: str, method: str, seeds: Sequence[int]) -> list[RunPlan]:
    """Plans of the seeds of a method in a panel, study/panel."""
    study, _, own = name.partition("/")
    comparison = replication(study, "paper")
    panels = tuple(panel for panel in comparison.panels if panel.name == own)
    changes, unused = Overrides(None, None, None, None, 0), Path("unused")
    plans = plan_replication(replace(comparison, panels=panels), max(seeds) + 1, unused, torch.device("cpu"), changes)
    return [plan for plan in plans if plan.label == method and plan.seed in seeds]


class SideBySide:
    """Training of the seeds of a method."""

    def __init__(self, plans: Sequence[RunPlan], data: Any) -> None:
        self.plans, self.data = plans, data
        self.name, seeds, training = plans[0].label, len(plans), plans[0].study.training
        self.per_epoch = len(data.train_targets) // training.batch_size
        self.batch, self.epochs = training.batch_size, training.epochs or 0
        models = [build_model(plan, data).state_dict() for plan in plans]
        self.weights = {key: torch.stack([model[key] for model in models]) for key in models[0]}
        for key, weight in self.weights.items():
            if weight.ndim == 5:
                self.weights[key] = weight.permute(0, 1, 3, 4, 2).contiguous()
        self.state: Tensors = {}
        for i, layer in enumerate(layers_of(self.weights)):
            features = self.weights[f"{layer}.weight"].shape[-1]
            if normalizes(self.name, i):
                self.weights |= {f"{i}.weight": torch.ones(seeds, features), f"{i}.bias": torch.zeros(seeds, features)}
            if normalizes(self.name, i) or self.name == "BNP":
                for key, value in STATISTICS[self.name].items():
                    self.state[f"{i}.{key}"] = torch.full((seeds, features), value)
        if self.name == "4 Things":
            for key, weight in list(self.weights.items()):
                self.state |= {f"{key}.{which}": torch.zeros_like(weight) for which in ("first", "second")}
        self.orders = [torch.Generator().manual_seed(plan.seed + 1) for plan in plans]
        self.permutations = torch.empty(0)
        self.images, self.test_images = (
            part.movedim(1, -1).contiguous() for part in (data.train_inputs, data.test_inputs)
        )
        self.iteration, self.seconds = 0, 0.0
        self.accuracies: list[list[float]] = []
        self.losses = torch.zeros(self.per_epoch, seeds)
        self.rate = plans[0].learning_rate
        self.compiled_step = torch.compile(step_of(self.name, self.rate), dynamic=False)
        self.compiled_test = torch.compile(self.outputs, dynamic=False)

    def clock(self) -> torch.Tensor:
        """Scalars that depend on the iteration."""
        done = self.iteration
        if self.name == "4 Things":
            return torch.tensor([1 - BETA_1 ** (done + 1), (1 - BETA_2 ** (done + 1)) ** 0.5])
        before, now = (1 - (1 - MOMENTUM) ** count for count in (done, done + 1))
        return torch.tensor([before, MOMENTUM / now])

    def step(self) -> None:
        """One iteration of every seed."""
        position = self.iteration % self.per_epoch
        if position == 0:
            samples = len(self.data.train_targets)
            self.permutations = torch.stack([torch.randperm(samples, generator=order) for order in self.orders])
        rows = self.permutations[:, position * self.batch : (position + 1) * self.batch]
        batch = self.images[rows], self.data.train_targets[rows]
        self.losses[position], outer = self.compiled_step(self.weights, self.state, *batch, self.clock())
        for layer, (slopes, inputs) in outer.items():
            self.weights[f"{layer}.weight"].addcmul_(slopes[:, :, None], inputs[:, None], value=-self.rate)
        self.iteration += 1

    def outputs(self, images: torch.Tensor) -> torch.Tensor:
        """Outputs (K, N, classes) at inference for images (N, height, width, channels)."""
        each = images.expand(len(self.plans), *images.shape)
        return network(self.weights, each, lambda i, h: tested_input(self.name, i, h, self.weights, self.state))

    @torch.no_grad()
    def evaluate(self) -> None:
        """Test accuracy of every seed, in percent."""
        right = torch.zeros(len(self.plans))
        for images, classes in zip(self.test_images.split(CHUNK), self.data.test_targets.split(CHUNK), strict=True):
            right += (self.compiled_test(images).argmax(2) == classes).sum(1)
        self.accuracies.append((100 * right / len(self.data.test_targets)).tolist())

    #: What a break would lose.
    KEPT = ("iteration", "seconds", "accuracies", "losses", "permutations", "weights", "state", "orders")

    def save(self, file: Path) -> None:
        """Write the state to a file."""
        state = {name: getattr(self, name) for name in self.KEPT} | {"runs": [plan.name for plan in self.plans]}
        state["orders"] = [order.get_state() for order in self.orders]
        torch.save(state, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)

    def load(self, file: Path) -> None:
        """Go on from the state in a file."""
        state = torch.load(file)
        if state["runs"] != [plan.name for plan in self.plans]:
            raise ConfigError(f"{file} holds {', '.join(state['runs'])}: delete it, or choose another --out")
        orders = zip(self.orders, state["orders"], strict=True)
        state["orders"] = [order.set_state(kept) for order, kept in orders]
        for name in self.KEPT:
            setattr(self, name, state[name])

    def run(self, file: Path) -> None:
        """Train to the end."""
        started = saved = time.monotonic() - self.seconds
        if not self.accuracies:
            self.evaluate()
        while self.iteration < self.epochs * self.per_epoch:
            self.step()
            over = self.iteration % self.per_epoch == 0
            if over:
                self.evaluate()
                print(self.name, self.iteration, self.accuracies[-1], round(time.monotonic() - started), flush=True)
            if over or time.monotonic() - saved > SAVE_SECONDS:
                saved = time.monotonic()
                self.seconds = saved - started
                self.save(file)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of the runs, as `small_comparisons` writes them; of the seconds each has its share."""
        by_seed = list(zip(*self.accuracies, strict=True))
        # a loss that was not finite leaves weights that are not
        losses = self.losses[-max(1, self.per_epoch // 10) :].double().mean(0).tolist()
        seconds = self.seconds / len(self.plans)
        return [
            {
                "study": plan.study.name,
                "panel": plan.study.panel,
                "method": plan.label,
                "seed": plan.seed,
                "rate": plan.learning_rate,
                "batch_size": self.batch,
                "iterations": self.iteration,
                "device": "cpu",
                "status": "finished" if math.isfinite(loss) else "diverged",
                "accuracy": f"{accuracy[-1]:.5g}",
                "best_accuracy": f"{max(accuracy):.5g}",
                "mean_accuracy": f"{fmean(accuracy[1:]):.5g}",
                "first_accuracy": f"{accuracy[1]:.5g}",
                "train_loss": f"{loss:.5g}",
                "bits_per_character": "nan",
                "seconds": f"{seconds:.5g}",
                "seconds_per_epoch": f"{seconds / self.epochs:.5g}",
            }
            for plan, accuracy, loss in zip(self.plans, by_seed, losses, strict=True)
        ]


def differences(joint: SideBySide, iterations: int) -> list[tuple[list[float], float]]:
    """Relative differences of each seed's losses, and of its test loss after them, from those of its own run."""
    for _ in range(iterations):
        joint.step()
    with torch.no_grad():
        outputs = torch.cat([joint.compiled_test(part) for part in joint.test_images.split(CHUNK)], 1)
    found = []
    for column, plan in enumerate(joint.plans):
        with rehearsal(plan, joint.data) as own:
            order, losses = own.shuffled(), []
            for i in range(iterations):
                batch = order[i * joint.batch : (i + 1) * joint.batch]
                losses.append(own.step(i, own.augment(own.inputs, batch), own.targets[batch])[0])
            test_loss = own.evaluate()["test_loss"] or 0.0
        here = functional.cross_entropy(outputs[column], joint.data.test_targets).item()
        relative = (joint.losses[:iterations, column] / torch.tensor(losses) - 1).abs().tolist()
        found.append((relative, abs(here / test_loss - 1)))
    return found


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("panel", choices=PANELS)
    parser.add_argument("method", choices=STATISTICS, help="name in the study")
    parser.add_argument("seeds", type=int, choices=range(5), nargs="+")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="file of rows, appended to")
    what.add_argument("--check", type=int, metavar="N", help="compare N iterations with the runs by themselves")
    given = parser.parse_args()
    torch.set_num_threads(1)
    plans = plans_of(given.panel, given.method, given.seeds)
    if not plans:
        parser.error(f"{given.panel} has no method {given.method!r}")
    data = load_data(plans[0].study.data)
    if given.check is not None:
        # in float32, normalization over two samples is chaotic within a few iterations
        torch.set_default_dtype(torch.float64)
        data = replace(data, train_inputs=data.train_inputs.double(), test_inputs=data.test_inputs.double())
        for plan, (losses, test) in zip(plans, differences(SideBySide(plans, data), given.check), strict=True):
            print(plan.name, *(f"{part:.0e}" for part in losses), f"test {test:.0e}")
        return
    joint, kept = SideBySide(plans, data), given.out.with_suffix(".pt")
    if kept.exists():
        try:
            joint.load(kept)
        except ConfigError as error:
            parser.error(str(error))
    joint.run(kept)
    with given.out.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        if not stream.tell():
            writer.writeheader()
        writer.writerows(joint.rows())
    kept.unlink()


if __name__ == "__main__":
    main()
