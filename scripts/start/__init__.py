"""What the composition root, scripts/launch.py, is made of."""
from __future__ import annotations
