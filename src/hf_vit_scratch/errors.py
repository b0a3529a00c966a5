"""The one exception by which the command line tells a user's mistake from a fault of the program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HTTPError
from transformers.utils import logging as transformers_logging


class UserError(ValueError):
    """Something that the user gave cannot be used; the message says what must hold, what was given, what to do."""

    def __init__(self, message: str):
        # A data loader's worker process hands an exception on as its whole traceback in text; keep its last line.
        super().__init__(str(message).rpartition("UserError: ")[2].strip())


@contextmanager
def blame_the_user(until: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Turn what libraries raise for wrong values into a `UserError` of one line; for the time before training.

    Once `until` returns true, an error is no longer the user's mistake, and passes unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, ImportError, RuntimeError, OSError, HTTPError) as error:
        if until():
            raise
        raise UserError(f"{' '.join(str(error).split())} ({type(error).__name__})") from error


@contextmanager
def blame_the_files(problem: str) -> Iterator[None]:
    """Turn whatever libraries raise for damaged, missing or foreign files into a `UserError`, and silence warnings.

    The message begins with the problem. The first sentence of the library follows.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # they raise many types, down to an AssertionError for a missing device
        text = " ".join(str(error).split()).removeprefix("Error tokenizing data. ")  # which tells nothing, by pandas
        reason = text.partition(". ")[0].removesuffix(".")
        raise UserError(f"{problem}: {reason} ({type(error).__name__}).") from error
    finally:
        transformers_logging.set_verbosity(verbosity)
