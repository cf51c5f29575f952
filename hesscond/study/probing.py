"""One row of the probe table: κ(H), κ(PᵀHP) and κ(D) of a unit on named data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hesscond.capture import MEMORY, FeatureStatistics, LayerCapture, LossFunction, Recorder, capture
from hesscond.hessians import BlockHessian, scaling_condition, stream, unit_hessian
from hesscond.methods import Method
from hesscond.methods.bnp import from_statistics, regularized
from hesscond.study.config import ProbeConfig

#: Samples in one chunk of the training set: 4096 × 3072 float64 inputs are 100 MB. Below, LAPACK's QR is half as fast.
CHUNK = 4096


class Prober:
    """Measures the units that a study names, on mini-batches and over the training set.

    Parameters
    ----------
    model, loss_fn, method
        What is being trained, and by which method. None of them is changed.
    config
        Layers, units and precision.
    layers
        The modules of ``config.layers``.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        method: Method,
        config: ProbeConfig,
        layers: Mapping[str, nn.Linear],
    ) -> None:
        self.model, self.loss_fn, self.method, self.config = model, loss_fn, method, config
        self.units = {name: tuple(config.units) for name in config.layers}
        self.recorder = Recorder(layers)

    def batch_rows(self, inputs: torch.Tensor, targets: torch.Tensor, output: torch.Tensor) -> list[dict[str, Any]]:
        """Rows for the mini-batch whose training pass gave ``output`` while the recorder was armed."""
        captures = None
        if self.config.precision == "as-trained":
            captures = self.recorder.captured(self.loss_fn, output, targets, self.units)
        if captures is None:
            captures = self._capture(inputs, targets)
        return [
            self._row(
                "batch",
                name,
                unit,
                unit_hessian(captured, unit, MEMORY),
                FeatureStatistics.of(captured.h),
                captured.bias,
            )
            for name, captured in captures.items()
            for unit in captured.units
        ]

    def train_rows(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[dict[str, Any]]:
        """Rows for the whole training set, streamed through the model as it is now."""
        samples = len(inputs)

        def chunks() -> Iterator[tuple[dict[str, LayerCapture], float]]:
            for start in range(0, samples, CHUNK):
                part = slice(start, start + CHUNK)
                captured = self._capture(inputs[part], targets[part])
                yield captured, len(targets[part]) / samples

        hessians, statistics = stream(chunks(), MEMORY)
        biased = {name: layer.bias is not None for name, layer in self.recorder.layers.items()}
        return [
            self._row("train", name, unit, hessian, statistics[name], biased[name])
            for (name, unit), hessian in hessians.items()
        ]

    def _capture(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, LayerCapture]:
        dtype = torch.float64 if self.config.precision == "float64" else None
        return capture(self.model, self.loss_fn, (inputs, targets), self.config.layers, units=self.units, dtype=dtype)

    def _row(
        self,
        data: str,
        layer: str,
        unit: int,
        hessian: BlockHessian,
        statistics: FeatureStatistics,
        bias: bool,
    ) -> dict[str, Any]:
        raw = from_statistics(statistics, bias=bias)
        own = self.method.preconditioner(layer)
        rtol = self.config.rtol
        systems = [None, raw] if own is None else [None, raw, own]
        plain, bnp, *rest = hessian.condition_numbers(systems, rtol=rtol)
        preconditioned = rest[0] if rest else bnp
        with_epsilons = regularized(raw.sigma.square()).sqrt_()
        row = {
            "data": data,
            "layer": layer,
            "unit": unit,
            "samples": statistics.count,
            "n_params": hessian.order,
            "kappa": plain.value,
            "kappa_lower": plain.lower,
            "kappa_upper": plain.upper,
            "kappa_preconditioned": preconditioned.value,
            "kappa_preconditioned_lower": preconditioned.lower,
            "kappa_preconditioned_upper": preconditioned.upper,
            "kappa_bnp": bnp.value,
            "kappa_D": raw.kappa_D,
            "kappa_D_eps": scaling_condition(with_epsilons, bias=bias),
            "dead": raw.dead,
            "rank": plain.rank,
            "nullity": plain.nullity,
            "negative": plain.negative,
            "resolved": int(plain.resolved),
            "lambda_max": plain.lambda_max,
            "lambda_min": plain.lambda_min,
            "rank_preconditioned": preconditioned.rank,
            "resolved_preconditioned": int(preconditioned.resolved),
            "coordinates": (own or raw).name,
            "solver": f"{plain.solver}; {preconditioned.solver}",
        }
        return row | self.method.diagnostics(layer)
