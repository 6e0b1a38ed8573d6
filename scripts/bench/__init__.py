"""The measurements of one run: `python -m scripts.bench --help`."""
