"""No example of a property has a deadline: it would fail on a machine that is busy. And Ctrl-C
reaches the runs that tests start, though a shell that put pytest into the background ignored it."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
