"""Measurements of one machine: what the pipeline costs beside the model, and how well a draft guesses."""
