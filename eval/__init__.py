"""The evaluation: data sets, the loop over them, and the metrics, tables and plots of the answers."""
from __future__ import annotations

import sys

from config.console import NEEDED_PACKAGES, enter

if sys.argv[:1] == ["-m"]:  # python3 -m eval.report
    enter(*NEEDED_PACKAGES)
