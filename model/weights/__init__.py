"""Weights on disk: checkpoints read, a rank's own folder, quantized forms."""
from __future__ import annotations
