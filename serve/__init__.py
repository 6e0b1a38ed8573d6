"""The server: OpenAI's protocol over HTTP for several users at a time, on a pipeline that stays loaded."""
from __future__ import annotations

import sys

from launch.console import NEEDED, SERVED, enter

if sys.argv[:1] == ["-m"]:  # python3 -m serve.fastchat
    enter(*NEEDED, *SERVED)
