"""A watch as a callback of Lightning."""

from __future__ import annotations

from typing import Any

from hesscond.lazy import optional
from hesscond.problem import evaluation
from hesscond.problem.containers import moved
from hesscond.watching import Watch as LoopWatch, watch
from hesscond.watching.destinations import numbers

with optional("hesscond.integrations.lightning"):
    from lightning.pytorch.callbacks import Callback

__all__ = ["Watch"]


class Watch(Callback):
    """`hesscond.watch` of a ``LightningModule``, whose ``forward`` is measured.

    It counts optimizer steps: accumulated batches make one step. Only the process of rank 0 measures.

    Parameters
    ----------
    loss_fn, probe_batch
        As `hesscond.watch` takes them; the batch is moved to the module's device.
    log
        As `hesscond.watch` takes it; None: the loggers of the ``Trainer``.
    options
        Further arguments of `hesscond.watch`. The optimizers are those of the ``Trainer``.

    Attributes
    ----------
    watch
        The watch of the training; None before it begins.
    """

    def __init__(
        self,
        loss_fn: evaluation.LossFunction,
        probe_batch: evaluation.Batch,
        *,
        log: Any = None,
        **options: Any,
    ) -> None:
        self.loss_fn, self.probe_batch, self.options = loss_fn, probe_batch, options
        # Lightning gives callbacks an attribute ``log`` of its own
        self._log = log
        self.watch: LoopWatch | None = None
        self._seen = 0
        self._state: dict[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        to_loggers = [lambda row, log=log: log.log_metrics(numbers(row), step=self._seen) for log in trainer.loggers]
        self.watch = watch(
            pl_module,
            self.loss_fn,
            moved(self.probe_batch, pl_module.device),
            list(trainer.optimizers) or None,
            log=to_loggers if self._log is None else self._log,
            **self.options,
        )
        self._seen = trainer.global_step
        if self._state is not None:
            self.watch.load_state_dict(self._state)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a step, if there was one."""
        if self.watch is not None and trainer.global_step != self._seen:
            self._seen = trainer.global_step
            self.watch.step(outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the watch."""
        if self.watch is not None:
            self.watch.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the watch as a context manager would after this exception."""
        if self.watch is not None:
            self.watch.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """State of the watch for Lightning's checkpoints."""
        return {} if self.watch is None else self.watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state from one of Lightning's checkpoints until the training begins."""
        self._state = state_dict or None
