"""`plan`: what a spec would cost on every stage and number of ranks, before anything runs."""


def plan() -> None:
    """Print what a spec would cost on every stage and number of ranks; nothing runs."""
