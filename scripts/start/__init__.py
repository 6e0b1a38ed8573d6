"""What the composition root, scripts/launch.py, is made of."""
