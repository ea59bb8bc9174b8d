"""The parser of a command `lockstep NAME`."""

import argparse


def parser_of(name: str, page: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments.

    Args:
        name: the command's name.
        page: the docstring of its module. Its first paragraph comes before the list of arguments, the others after it.
    """
    description, _, epilog = (page or "").partition("\n\n")
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"lockstep {name}", description=description, epilog=epilog, formatter_class=layout)
