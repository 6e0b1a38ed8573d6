"""The training of draft heads of EAGLE."""
