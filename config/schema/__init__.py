"""What files of other people may say: families of models, draft heads, their fields, untrusted JSON."""
from __future__ import annotations
