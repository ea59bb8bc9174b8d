"""The error that a user can fix. Standard library only."""


class UserError(Exception):
    """Bad input. The message is one line: `what is wrong: what would be right`."""
