"""The commands of python -m scripts.simulate."""
