"""The one exception that a user's mistake raises."""


class UsageError(ValueError):
    """Bad input: one line that says what is wrong and what would be right.

    The command lines print it and exit with status 2.
    """
