"""Which runs of a grid are trained together: those that differ in seed only, where that can be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from hesscond.data import Dataset
from hesscond.study.executors import DataKey, data_key
from hesscond.study.runner import RunPlan
from hesscond.study.stacking import obstacle
from hesscond.study.together import is_new

#: Runs in a pass below which a group is not divided: two together take about 1.5 times as long as one.
FEWEST = 2


@dataclass(frozen=True)
class Groups:
    """The runs of each task.

    Attributes
    ----------
    together
        Groups of several, the largest first.
    alone
        The others.
    reasons
        Why they are alone, with the number of runs.
    """

    together: list[list[RunPlan]]
    alone: list[RunPlan]
    reasons: Mapping[str, int]

    @property
    def tasks(self) -> list[list[RunPlan]]:
        """All, those that take longest first."""
        return [*self.together, *([plan] for plan in self.alone)]


def each_alone(plans: Sequence[RunPlan]) -> Groups:
    """No runs together."""
    return Groups([], list(plans), {})


def grouped(plans: Sequence[RunPlan], data: Mapping[DataKey, Dataset], jobs: int | None) -> Groups:
    """Put runs together that differ in seed only.

    Alone are those that cannot be trained together (`obstacle`), that have begun, or that nothing else goes with.

    Parameters
    ----------
    plans
        What is left to do.
    data
        Of every plan, by its `data_key`, on the CPU.
    jobs
        How many tasks are done at a time; groups are divided so that all of them have work. None: that is not known.
    """
    obstacles: dict[tuple[int, str], str | None] = {}
    alike: dict[tuple[int, str, float], list[RunPlan]] = {}
    apart: list[tuple[RunPlan, str]] = []
    for plan in plans:
        point = id(plan.study), plan.method
        if point not in obstacles:
            # a cluster's GPU need not be in this machine
            obstacles[point] = obstacle(replace(plan, device=torch.device("cpu")), data[data_key(plan)])
        if reason := obstacles[point] or ("" if is_new(plan) else "begun before"):
            apart.append((plan, reason))
        else:
            alike.setdefault((*point, plan.learning_rate), []).append(plan)
    whole = [group for group in alike.values() if len(group) >= FEWEST]
    apart += [(plan, "no other seed") for group in alike.values() if len(group) < FEWEST for plan in group]
    alone = [plan for plan, _ in apart]
    return Groups(spread(whole, len(alone), jobs), alone, Counter(reason for _, reason in apart))


def spread(groups: Sequence[Sequence[RunPlan]], others: int, jobs: int | None) -> list[list[RunPlan]]:
    """Divide groups until there are as many tasks as are done at a time, or a multiple of it; the largest first.

    Parameters
    ----------
    groups
        Of at least `FEWEST` runs each.
    others
        Tasks beside them.
    jobs
        As for `grouped`.
    """
    parts = [1] * len(groups)
    wanted = 0 if jobs is None else -(-(len(groups) + others) // jobs) * jobs - others
    while sum(parts) < wanted:
        large = [n for n, group in enumerate(groups) if len(group) // (parts[n] + 1) >= FEWEST]
        if not large:
            break
        parts[max(large, key=lambda n: len(groups[n]) / parts[n])] += 1
    divided = [
        list(group[len(group) * part // count : len(group) * (part + 1) // count])
        for group, count in zip(groups, parts, strict=True)
        for part in range(count)
    ]
    return sorted(divided, key=len, reverse=True)
