"""A pipeline that stays: OpenAI's protocol over HTTP, several users at a time."""
from __future__ import annotations

import sys

from launch.console import NEEDED, SERVED, enter

if sys.argv[:1] == ["-m"]:  # python -m serve.fastchat
    enter(*NEEDED, *SERVED)
