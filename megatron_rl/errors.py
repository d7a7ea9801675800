"""Errors that a user can act on. The command line turns each into a message and an exit status."""

from __future__ import annotations

import re
import reprlib

EXIT_DONE, EXIT_FAULT, EXIT_BAD_INPUT, EXIT_ENDED_BY_LIMIT = 0, 1, 2, 3
EXIT_INTERRUPTED = 130  # a second Ctrl-C, or one outside the loop; the status of SIGINT in shells
EXIT_PIPE_CLOSED = 141  # the reader of the output has ended (`… | head`); the status of SIGPIPE in shells


# Control characters of terminals except line feed and tab, characters that change the direction of text, other line
# separators, and halves of surrogate pairs.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
_MESSAGE_CHARACTERS = 20_000  # longest message, as texts of files and servers can be very long


def printable(text: str) -> str:
    """Return ``text`` with characters that could control a terminal or a page written as escapes."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


def message_text(error: object) -> str:
    """Return the printable text of an error, cut if it is very long."""
    text = str(error)
    if len(text) > _MESSAGE_CHARACTERS:
        text = f"{text[:_MESSAGE_CHARACTERS]} … ({len(text) - _MESSAGE_CHARACTERS} characters more)"
    return printable(text)


def shown(value: object, most: int = 300) -> str:
    """Return ``value`` (from a file or a server) for a message: one line of at most ``most`` characters.

    An exception gives its text, anything else its repr.
    """
    if isinstance(value, BaseException):
        text = str(value)
        text = " ".join(text[: 2 * most].split())
    else:
        text = _short.repr(value) if not isinstance(value, str) else repr(value[: most + 1])
    text = printable(text)
    return text if len(text) <= most else text[: most - 3] + "..."


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class InputError(ValueError):
    """A recipe, dataset or checkpoint that cannot be used: exit status 2, before any engine starts.

    Messages name the file, the key or row, what was found, what is allowed and the likely fix.
    """


class OwnWarning(UserWarning):
    """A warning of this package. Tests turn unexpected ones into errors."""


class RunEnded(RuntimeError):
    """An alarm or a limit ended the run on purpose: exit status 3. What was computed is saved."""


class Fault(RuntimeError):
    """A part that the run needs is broken (an engine, a worker, a disk): exit status 1. Raised on every rank."""

    @property
    def explains_itself(self) -> bool:
        """Whether the message says all that helps; else the command line prints where it was raised, too."""
        return False
