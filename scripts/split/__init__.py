"""The library behind split_and_save_models.py."""
