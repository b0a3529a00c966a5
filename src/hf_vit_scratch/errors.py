"""The one exception by which the command line tells a user's mistake from a fault of the program."""


class UserError(ValueError):
    """Something that the user gave cannot be used; the message says what must hold, what was given, what to do."""

    def __init__(self, message: str):
        # A data loader's worker process hands an exception on as its whole traceback in text; keep its last line.
        super().__init__(str(message).rpartition("UserError: ")[2].strip())
