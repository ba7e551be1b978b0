"""What an exception that ends a rank's program is for the others: said when the interpreter ends, if nobody closed."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable


class LastWords:
    """Calls `close("ValueError: ...")` at the end of a program that an exception has ended, until `cancel` or the end
    of its object.
    """

    def __init__(self, close: Callable[[str], None]) -> None:
        """`close`: a bound method."""
        self._close = weakref.WeakMethod(close, lambda _: self.cancel())
        atexit.register(self._speak)

    def cancel(self) -> None:
        """There is nothing to say any more."""
        atexit.unregister(self._speak)

    def _speak(self) -> None:
        close, error = self._close(), getattr(sys, "last_value", None)  # set with the traceback that was printed
        if close is not None and error is not None:
            close(f"{type(error).__name__}: {error}")
