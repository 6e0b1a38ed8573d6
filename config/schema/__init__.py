"""Schemas of files from other people: families of models, draft heads, their fields, untrusted JSON."""
from __future__ import annotations
