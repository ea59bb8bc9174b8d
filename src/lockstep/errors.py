"""The error that a user can mend. Standard library only."""


class UserError(Exception):
    """Bad input. The message is one line for people: what is wrong, and what would be right."""
