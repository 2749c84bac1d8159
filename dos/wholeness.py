"""Whether the state is that of one step: what is asked before it is stepped, saved or loaded."""

from __future__ import annotations

from dos.errors import ConfigError
from dos.execute.interpreter import RunningStep


class Wholeness:
    """State is of two steps from an update's begin to its end, and of two states while it loads.

    So it stays where a step fails after an update has begun, or a load half-way.

    Attributes:
        loading: a load has begun and not ended.
    """

    def __init__(self) -> None:
        self._stepping = self.loading = self._loading_before = False
        self._step: RunningStep | None = None

    def step_begins(self) -> None:
        """A step is about to begin; `step_runs` or nothing follows."""
        self._stepping, self._step = True, None

    def step_runs(self, step: RunningStep) -> None:
        """This is the step that has begun."""
        self._step = step

    def step_ended(self) -> None:
        """The step succeeded."""
        self._stepping, self._step = False, None

    def load_begins(self) -> None:
        """Somebody is about to write all of the state."""
        self._loading_before, self.loading = self.loading, True

    def load_ended(self) -> None:
        """All of the state has been written."""
        self.loading = False
        self.step_ended()

    def load_abandoned(self) -> None:
        """Nothing has been written: all is as it was when the load began, torn if it was."""
        self.loading = self._loading_before

    def check(self, where: str, *, loads: bool = False) -> None:
        """Raise ConfigError if a step or a load failed half-way; `loads`: if a step did."""
        torn = self._step is None or (self._step.failed and self._step.begun)
        if self._stepping and torn:
            raise ConfigError(
                "an earlier step failed half-way and left state of two steps",
                where=where,
                fix="restore weights from a checkpoint and make a new optimizer",
            )
        if self.loading and not loads:
            raise ConfigError(
                "a load failed half-way, or has not ended, and left parts of two states",
                where=where,
                fix="load another checkpoint, or a whole state dict",
            )
