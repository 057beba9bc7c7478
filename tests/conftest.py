"""How hypothesis draws: always the same in `ci/test`, anew in `ci/test --full` and by hand.

A check that is drawn anew may find a fault in code that nobody touched: welcome where somebody
looks for faults, in the way where a change is judged. A test that names no number of its own draws
40 where it draws the same ones at every change, and a hundred else. No deadline: these machines
have other work.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("exploring", deadline=None)
settings.load_profile("repeatable" if os.environ.get("FT_FULL") == "0" else "exploring")
