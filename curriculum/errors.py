"""The one exception that means: what the user gave is wrong."""


class InputError(ValueError):
    """The user's input cannot be used as it is; the command exits with code 2.

    Each problem is one line that says where, what was got, what was expected and how to mend it.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        super().__init__("\n".join(problems))
