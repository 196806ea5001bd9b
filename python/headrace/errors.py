"""The one exception for faults of the user: a recipe, a file or data. Programs print its message alone and exit with code 2."""


class UserError(Exception):
    """One sentence or two: what was found, what is needed, what to try."""
