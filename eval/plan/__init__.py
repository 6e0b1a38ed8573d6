"""The evaluation: data sets, the loop over them, and what is made of the answers."""
