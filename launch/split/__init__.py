"""Split a model into a folder for each rank, for `split_and_save_models.py` and for a first start."""
from __future__ import annotations
