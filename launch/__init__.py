"""Start a pipeline from a configuration: checks before the start, and the ranks of one machine or of several hosts."""
from __future__ import annotations
