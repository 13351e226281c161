"""Define every error that Penstock raises on purpose, as one tree.

PenstockError                 what, where, hint; exit_code for the CLI
├── ConfigError               an option or a file is wrong (exit 78)
│   ├── UsageError            what was typed cannot be meant (exit 2)
│   ├── CheckpointError       the model folder cannot be served (exit 78)
│   └── SeveralWrong          several of them, told together (exit 78)
├── FileError                 a file that was named cannot be read or made (exit 2, 4, 5)
├── AlreadyRunning            another daemon has what this one needs (exit 9)
├── WorkerFailed              a worker process could not start or keep running
│   └── WorkerUnfit           and no start succeeds until a person acts (exit 78)
├── ChannelClosed             the other end of a worker channel is gone
│   └── ChannelGarbled        it sent bytes that are no message
├── InvariantViolated         the ledger does not add up: a bug of ours
├── Unreadable                a grammar, a schema or a template cannot be used
│   ├── GrammarError          in engine/text/grammar.py
│   └── Overran               it takes too much time or memory to read
│       └── TooSlow           it takes too much time
└── RequestError              a client's request is refused; status, code, param
├── Forbidden             403: the peer's role, or whose it is
├── QueueFull             429: the queue is full, for all or for this owner, or too slow
└── Unavailable           503: loading or draining; retry_after_ms
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.printable import printable

_FILE_EXIT_CODES = {
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), 2),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), 4),
    errno.ENOENT: 5,
}


WHAT_IS_SERVED = "docs/models.md lists what is served; is the file as its maker published it?"
DOWNLOAD_AGAIN = "download the file again; if it stays so, docs/models.md lists what is served"


class PenstockError(Exception):
    """Something failed that a person can act on.

    Args:
        what: one sentence, no trailing full stop.
        where: the file, option, device or request concerned; empty if unknown.
        hint: what to do about it; empty if nothing helps.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what, where, hint)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" if self.where else self.what


class ConfigError(PenstockError):
    """An option, environment variable or configuration file is wrong."""

    exit_code = 78  # EX_CONFIG; the systemd unit does not restart on it


class UsageError(ConfigError):
    """What was typed cannot be meant; the command's own check of its words ends alike."""

    exit_code = 2


class SeveralWrong(ConfigError):
    """Several errors, told together, so that all can be mended at once.

    Args:
        errors: each in full, at least one.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("; ".join(map(str, errors)))
        self.errors = tuple(errors)


def refuse(wrong: Sequence[ConfigError]) -> None:
    """Raise what is wrong, if anything is.

    Raises:
        ConfigError: the only one, or `SeveralWrong`.
    """
    flat = [one for error in wrong for one in getattr(error, "errors", (error,))]
    if flat:
        raise flat[0] if len(flat) == 1 else SeveralWrong(flat)


class CheckpointError(ConfigError):
    """The model folder cannot be served; `where` names the file, `what` the tensor or key.

    Without another hint: what helps wherever a file is not what its maker has published.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(printable(what), where=printable(where), hint=hint or DOWNLOAD_AGAIN)


class NotFinite(CheckpointError):
    """A weight is infinite or no number: no start succeeds until the file is another."""


def unreadable(path: Path, error: OSError, what: str = "cannot read") -> CheckpointError:
    """Make the error for an existing model file that cannot be read."""
    hint = "let the user who serves read it: chmod, or serve as its owner"
    return CheckpointError(f"{what}: {error.strerror}", where=str(path), hint=hint)


@contextmanager
def reading_model(path: Path | str) -> Iterator[None]:
    """Turn whatever reading a model's files raises into CheckpointError.

    Files are strangers' work: no content may end the process that reads them.
    """
    try:
        yield
    except (PenstockError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from error
    except MemoryError as error:
        hint = "is the file as its maker published it? else free memory"
        what = "reading it takes more memory than there is"
        raise CheckpointError(what, where=str(path), hint=hint) from error
    except BaseException as error:  # a panic of Rust is no Exception
        what = f"cannot read it: {type(error).__name__}: {error}"
        raise CheckpointError(what[:300], where=str(path)) from error


class FileError(PenstockError):
    """A file that was named cannot be read or made.

    Exit codes: 5, it or its folder is not there; 4, it is not ours to open; 2, one stands there
    already, or it is a folder.

    Args:
        what: what could not be done, as `cannot write the copy`.
        error: what the operating system says.
        hint: what to do about it.
    """

    def __init__(self, what: str, error: OSError, *, where: str, hint: str = "") -> None:
        super().__init__(f"{what}: {error.strerror or error}", where=where, hint=hint)
        self.exit_code = file_exit_code(error)


def file_exit_code(error: OSError) -> int:
    """Return the exit code of a command that could not use a file."""
    return _FILE_EXIT_CODES.get(error.errno or 0, PenstockError.exit_code)


class AlreadyRunning(PenstockError):
    """Another daemon has the state directory."""

    exit_code = 9


class WorkerFailed(PenstockError):
    """A worker process could not start or keep running."""


class WorkerUnfit(WorkerFailed):
    """No start of this worker succeeds until a person changes the machine or the settings."""

    exit_code = ConfigError.exit_code


class ChannelClosed(PenstockError):
    """The process at the other end of a channel is gone."""


class ChannelGarbled(ChannelClosed):
    """The process at the other end sent bytes that are no message; nothing after them counts."""


class InvariantViolated(PenstockError):
    """The ledger does not add up. Always a bug of ours, never the user's doing."""


class Unreadable(PenstockError):
    """A stranger's text is refused; the message is for its author."""


class Overran(Unreadable):
    """A stranger's text takes too much time or memory to read."""


class TooSlow(Overran):
    """A stranger's text takes too much time to read."""


class RequestError(PenstockError):
    """A client's request is refused.

    Args:
        what: the message the client reads.
        code: stable string code of the OpenAI error object, or None.
        param: the offending field, or None.
        kind: the error object's `type`.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int = 400,
        kind: str = "invalid_request_error",
        retry_after_ms: int | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(what, hint=hint)
        self.code = code
        self.param = param
        self.status = status
        self.kind = kind
        self.retry_after_ms = retry_after_ms


class Forbidden(RequestError):
    """The peer may not do this; `code` is `role_required` or `not_owner`."""

    def __init__(self, what: str, *, code: str, hint: str = "") -> None:
        super().__init__(what, code=code, status=403, kind="permission_error", hint=hint)


class QueueFull(RequestError):
    """There is no room in the queue; the client should come back after `retry_after_ms`.

    `code` is `queue_full`; `user_quota` where others would find room; or `would_wait_too_long`
    where there is room, but the wait would exceed its limit.
    """

    def __init__(self, what: str, *, retry_after_ms: int, code: str = "queue_full") -> None:
        super().__init__(
            what,
            code=code,
            status=429,
            kind="rate_limit_error",
            retry_after_ms=retry_after_ms,
        )


class Unavailable(RequestError):
    """The appliance cannot take work now: `model_loading`, `draining` or `engine_dead`."""

    def __init__(self, what: str, *, code: str, retry_after_ms: int = 1000) -> None:
        super().__init__(
            what, code=code, status=503, kind="unavailable_error", retry_after_ms=retry_after_ms
        )
