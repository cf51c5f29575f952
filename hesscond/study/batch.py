"""Several runs in one call: methods × seeds of one study, planned and checked before the first one starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from hesscond.errors import ConfigError
from hesscond.methods import parse
from hesscond.study.config import StudyConfig
from hesscond.study.log import check_free, check_no_run
from hesscond.study.runner import RunPlan
from hesscond.study.sections import LARGEST_RATE, sentence


@dataclass(frozen=True)
class Overrides:
    """What the command line may change of a study; None leaves it as it is."""

    iterations: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    probe_every: int | None = None
    statements: tuple[str, ...] = ()

    def apply(self, study: StudyConfig) -> StudyConfig:
        """The study with the changes made.

        Raises
        ------
        ConfigError
            Both iterations and epochs, or a value out of its range.
        """
        if self.iterations is not None and self.epochs is not None:
            raise ConfigError("give either --iterations or --epochs, not both")
        for option, value in (
            ("--iterations", self.iterations),
            ("--epochs", self.epochs),
            ("--batch-size", self.batch_size),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"{option} must be at least 1, got {value}")
        if self.learning_rate is not None and not 0 < self.learning_rate <= LARGEST_RATE:
            raise ConfigError(f"--lr must be positive and at most {LARGEST_RATE:.3g}, got {self.learning_rate}")
        if self.probe_every is not None and self.probe_every < 0:
            raise ConfigError(f"--probe-every must be at least 0 (0: no probing), got {self.probe_every}")
        training, probe = dict(study.training), dict(study.probe)
        if self.iterations is not None:
            training |= {"iterations": self.iterations, "epochs": None}
        if self.epochs is not None:
            training |= {"epochs": self.epochs, "iterations": None}
        if self.batch_size is not None:
            training["batch_size"] = self.batch_size
        if self.probe_every is not None:
            probe["every"] = self.probe_every
            if self.probe_every == 0:
                probe["train_every_epochs"] = 0
        try:
            there = [dict(own) for own in study.statements]
            added = [{"id": id} for id in self.statements if {"id": id} not in there]
            changed = {"training": training, "probe": probe, "statements": there + added}
            return StudyConfig.model_validate({**dict(study), **changed})
        except ValidationError as error:
            raise ConfigError(sentence(error)) from None


def plan_runs(
    study: StudyConfig,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    device: torch.device,
    overrides: Overrides,
    *,
    resume: bool = False,
) -> list[RunPlan]:
    """One plan for every method and seed, with folders that are free, or may be there if ``resume``.

    A single run goes to ``out`` itself, several to ``out/METHOD-seedS``.

    Raises
    ------
    ConfigError
        Unknown or repeated method, no learning rate for it, a folder that is not free.
    """
    if len(set(methods)) < len(methods) or len(set(seeds)) < len(seeds):
        raise ConfigError("a method or seed is given twice")
    study = overrides.apply(study)
    single = len(methods) * len(seeds) == 1
    if not resume:
        check_free(out) if single else check_no_run(out)
    plans = []
    for method in methods:
        spec = parse(method)
        rate = overrides.learning_rate or study.learning_rate(method, study.training.batch_size)
        for seed in seeds:
            folder = out if single else out / f"{spec.folder}-seed{seed}"
            if not resume:
                check_free(folder)
            plans.append(RunPlan(study, method, seed, rate, folder, device))
    return plans
