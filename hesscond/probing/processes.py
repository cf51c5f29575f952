"""Measurements that several processes make together, each with its share of the data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hesscond.capture.captured import LayerCapture
from hesscond.errors import CaptureError, ConfigError, HesscondError
from hesscond.hessians import HessianOperator
from hesscond.hessians.coordinates.base import BlockHessian
from hesscond.hessians.factored import FactoredHessian
from hesscond.hessians.streaming import StreamedBlock
from hesscond.operators import parallel
from hesscond.probing.check import Check
from hesscond.problem import weighting

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def team_of(model: nn.Module, group: ProcessGroup | None) -> parallel.Team | None:
    """Processes that measure together: those of ``group``, or of a ``DistributedDataParallel`` model; None: one."""
    check_group(group)
    if group is None and isinstance(model, nn.parallel.DistributedDataParallel):
        group = model.process_group
    return None if group is None or group.size() == 1 else parallel.Team(group)


def check_group(group: object) -> None:
    """Raise a ConfigError if ``group`` is no process group of torch."""
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise ConfigError(f"group must be a process group of torch.distributed, not {group!r}")


def refuse_sharded(model: nn.Module) -> None:
    """Raise a ConfigError for a model whose parameters are split over processes."""
    # compared by name, since importing DTensor takes a second
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor" or type(parameter.data).__name__ == "DTensor":
            raise ConfigError(
                f"parameter {name!r} is sharded over processes (FSDP2): give every process a plain model with the "
                "whole parameters (torch.distributed.checkpoint.state_dict.get_model_state_dict with "
                "full_state_dict=True), its share of the data, and group="
            )


def agreed(team: parallel.Team, make: Callable[[], HessianOperator]) -> HessianOperator:
    """Operator of this process, once all processes have made theirs, of the same model."""
    operator, failure = None, None
    try:
        operator = make()
        _ = operator.problem.masses  # may be refused too
    except HesscondError as error:
        failure = error
    parallel.all_or_none(team, None, failure)
    assert operator is not None
    fingerprint = hashlib.sha256(operator.point.cpu().numpy().tobytes()).hexdigest()
    if len(set(team.gathered(fingerprint))) > 1:
        raise ConfigError(
            "the processes have different parameters: make the model with the same random seed in each, or load it"
        )
    return operator


def shared(operator: HessianOperator, team: parallel.Team) -> parallel.DataParallel:
    """Operator of the data of all processes, from the operator of each process."""
    masses = operator.problem.masses
    return parallel.DataParallel(operator, weighting.mass_of(masses, team.gathered(masses)).share, team)


@dataclass(frozen=True)
class LayerSums:
    """Captures of one batch, or Hessians summed over a stream, with statistics, weights and checks."""

    blocks: Mapping[str, Mapping[int | None, BlockHessian]]
    statistics: dict[str, Any]
    routes: dict[str, str]
    masses: Mapping[weighting.Rule, float]
    total: float
    captures: Mapping[str, LayerCapture] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    uncertainties: dict[str, float] = field(default_factory=dict)


def summed(team: parallel.Team, make: Callable[[], LayerSums]) -> LayerSums:
    """Hessians over the data of all processes, from those that each makes over its share."""
    own, failure = None, None
    try:
        own = make()
    except HesscondError as error:
        failure = error
    return joined(parallel.all_or_none(team, own, failure))


def joined(parts: Sequence[LayerSums]) -> LayerSums:
    """Join the results of several processes."""
    everyone = [part.masses for part in parts]
    masses = [weighting.mass_of(own, everyone) for own in everyone]
    blocks: dict[str, dict[int | None, BlockHessian]] = {}
    found = LayerSums(blocks, {}, {}, {}, masses[0].total)
    if found.total == 0:
        raise CaptureError("no target in the data of any process counts in the loss: there is no Hessian")
    streamed: dict[tuple[str, int | None], StreamedBlock] = {}
    for part, mass in zip(parts, masses, strict=True):
        for name, own in part.blocks.items():
            found.routes.setdefault(name, part.routes[name])
            for unit, block in own.items():
                into = streamed.setdefault((name, unit), StreamedBlock(block.order, block.units))
                # the rank limit of a streamed factor is that of a loss invariant under a shift of all units
                shift = isinstance(block, FactoredHessian) and block.rank_limit is not None
                into.add(block, mass.value, shift=shift)
        for name, own_statistics in part.statistics.items():
            known = found.statistics.get(name)
            found.statistics[name] = own_statistics if known is None else known.merged(own_statistics)
        for name, check in part.checks.items():
            worst = found.checks.get(name)
            if worst is None or check.difference > worst.difference:
                found.checks[name] = check
            found.uncertainties[name] = max(found.uncertainties.get(name, 0.0), part.uncertainties[name])
    for (name, unit), streamed_block in streamed.items():
        blocks.setdefault(name, {})[unit] = streamed_block.hessian(found.total)
    return found
