"""The library behind scripts/bench.py."""
