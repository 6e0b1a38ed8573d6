"""Plans: the choice of method, split and draft for given devices, and its evaluation."""
