"""A model split into a folder for each rank: what `split_and_save_models.py` and a first start do."""
from __future__ import annotations
