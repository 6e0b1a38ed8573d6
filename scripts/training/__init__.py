"""The library of scripts/train_eagle.py: rows of text, what a head is taught in them, and the training loop."""
