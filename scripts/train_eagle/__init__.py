"""The training of a draft head: `python -m scripts.train_eagle --help`."""
