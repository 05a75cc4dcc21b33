"""No example of a property has a deadline: it would fail on a machine that is busy. And Ctrl-C
reaches the runs that tests start, though a shell that put pytest into the background ignored it."""

from __future__ import annotations

import signal

try:
    from hypothesis import settings
except ImportError:
    # pytest reads this file for a run of the matrix as well (`pytest --device virtual:h200`, whose
    # value it takes for a path that is not there), and what that needs has no hypothesis.
    pass
else:
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
