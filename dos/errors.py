"""Errors for users: each says what happened, where, and how to fix it.

All of them are `ValueError`s, so that ``except ValueError`` around a configuration
keeps working. A call that refuses its input so leaves everything as it was before.
"""

from __future__ import annotations


class DOSError(ValueError):
    """Base of every error that this library raises for its user.

    Args:
        what: what is wrong, in one sentence, with the offending value.
        where: the option, parameter, file or op that it is about; may be empty.
        fix: what to do about it; may be empty.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        super().__init__(what, where, fix)

    def __str__(self) -> str:
        located = f"{self.where}: {self.what}" if self.where else self.what
        return f"{located}\n  fix: {self.fix}" if self.fix else located

    def __reduce__(self) -> tuple[object, ...]:
        # Keyword-only arguments do not survive the default pickling of exceptions,
        # and errors cross process boundaries (DataLoader workers, ranks).
        return (_rebuild, (type(self), self.what, self.where, self.fix))


class ConfigError(DOSError):
    """An option, a parameter or a param group cannot be used."""


class IntegrationError(DOSError):
    """Another library cannot be worked with: its version, its settings, or its state."""


class NonFiniteError(DOSError, RuntimeError):
    """A norm of gradients is infinite or NaN, and the caller asked to be told."""


class PlanError(DOSError):
    """A plan breaks one of the rules that `dos.plan.verify` checks, or does not parse."""


class PoolError(DOSError):
    """Host memory: a pool too small, a lease that did not come free in time, a forked child."""


class FormatError(DOSError):
    """A checkpoint is of a form that this version does not read or write, or is malformed."""


class RefusedError(FormatError):
    """A checkpoint that may be whole is not read as was asked: newer, not allowed, or no fit.

    No older one is taken for it, as there is for a damaged one.
    """


class IntegrityError(DOSError):
    """Bytes of a checkpoint are not those that were written: damaged, truncated or swapped."""


class CheckpointError(DOSError):
    """A checkpoint could not be written; what was there before is intact."""


def first_line(error: BaseException) -> str:
    """What an error of another library says first, short enough for a message of ours."""
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _rebuild(kind: type[DOSError], what: str, where: str, fix: str) -> DOSError:
    return kind(what, where=where, fix=fix)
