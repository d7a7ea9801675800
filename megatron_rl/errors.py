"""Errors that a user can act on. The command line turns each into one message and an exit status."""

from __future__ import annotations

EXIT_DONE, EXIT_FAULT, EXIT_BAD_INPUT, EXIT_ENDED_BY_LIMIT = 0, 1, 2, 3
EXIT_INTERRUPTED = 130  # a second Ctrl-C, or one outside the loop; what shells say of SIGINT
EXIT_PIPE_CLOSED = 141  # whoever read the output has left (`… | head`); what shells say of SIGPIPE


class InputError(ValueError):
    """A recipe, dataset or checkpoint that cannot be used: exit status 2, before any engine starts.

    Messages name the file, the key or row, what was found, what is allowed and the likely fix.
    """


class OwnWarning(UserWarning):
    """What this package warns of while work goes on. The tests turn each into an error where none is expected."""


class RunEnded(RuntimeError):
    """An alarm or a limit ended the run on purpose: exit status 3. What was computed is saved."""


class Fault(RuntimeError):
    """Something that the run depends on broke (an engine, a worker, a disk): exit status 1. Raised on every rank."""
