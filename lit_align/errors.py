"""What goes wrong on the user's side, told apart from what goes wrong on ours.

The command line prints the message of a `UserError` and nothing else; any other exception is a
fault of the program and keeps its traceback.
"""


class UserError(ValueError):
    """A mistake in what the user gave: the message alone says what is wrong and how to mend it."""


def missing_extra(package: str, extra: str) -> UserError:
    """The error for an optional package that is not installed, with the command that brings it."""
    return UserError(
        f"this needs the package '{package}', which is not installed: "
        f"pip install 'lit-align[{extra}]'"
    )
