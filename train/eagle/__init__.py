"""Training of draft heads of the EAGLE family."""
