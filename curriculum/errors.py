"""The one exception that means: what the user gave is wrong."""

from collections.abc import Sequence


class InputError(ValueError):
    """The user's input cannot be used as it is; the command exits with code 2.

    Each problem is one line that says where, what was got, what was expected and how to mend it. `details` are lines to
    read or to copy, of all problems together.
    """

    def __init__(self, *problems: str, details: Sequence[str] = ()):
        self.problems, self.details = problems, tuple(details)
        super().__init__("\n".join([*problems, *details]))
