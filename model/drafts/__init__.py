"""Drafts, which produce guesses: networks, copies of earlier text, and mixtures of several sources."""
from __future__ import annotations
