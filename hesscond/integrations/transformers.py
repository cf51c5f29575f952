"""A watch as a callback of Hugging Face's ``Trainer``."""

from __future__ import annotations

from typing import Any

from hesscond.lazy import optional
from hesscond.problem import evaluation
from hesscond.problem.containers import moved
from hesscond.watching import Watch as LoopWatch, watch

with optional("hesscond.integrations.transformers"):
    from transformers import TrainerCallback

__all__ = ["Watch"]


class Watch(TrainerCallback):
    """`hesscond.watch` of the model of a ``Trainer``.

    It counts optimizer steps: accumulated batches make one step. Only the process of rank 0 measures. Rows are added to
    the ``log_history`` of the trainer's state, which its checkpoints hold.

    Parameters
    ----------
    probe_batch
        As `hesscond.watch` takes it, usually the mapping that a collator makes, with ``"labels"``; it is moved to the
        model's device.
    loss_fn
        As `hesscond.watch` takes it; None: the loss that the model returns.
    log
        As `hesscond.watch` takes it: ``"wandb"`` and ``"mlflow"`` add to the run that ``report_to`` has opened.
    options
        Further arguments of `hesscond.watch`. GPT-2's dense layers are ``Conv1D``, which have to be named in
        ``layers``.

    Attributes
    ----------
    watch
        The watch of the training; None before it begins.
    """

    def __init__(
        self,
        probe_batch: evaluation.Batch,
        loss_fn: evaluation.LossFunction | None = None,
        *,
        log: Any = None,
        **options: Any,
    ) -> None:
        self.loss_fn, self.probe_batch, self.log, self.options = loss_fn, probe_batch, log, options
        self.watch: LoopWatch | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin to watch; a training that is resumed is counted from where it stands."""
        self.watch = watch(
            model,
            self.loss_fn,
            moved(self.probe_batch, model.device),
            optimizer,
            log=self.log,
            **self.options,
        )
        if state.global_step:
            self.watch.load_state_dict({"steps": state.global_step})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        if self.watch is not None and (row := self.watch.step()) is not None:
            state.log_history.append({**row, "step": state.global_step})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the watch."""
        if self.watch is not None:
            self.watch.close()
