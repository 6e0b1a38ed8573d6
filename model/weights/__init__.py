"""Weights on disk: reading checkpoints, a rank's own folder, quantized forms."""
from __future__ import annotations
