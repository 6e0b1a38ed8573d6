"""The cluster: who the ranks are, how they meet, how they talk, and how a lost one is noticed and replaced."""
from __future__ import annotations
