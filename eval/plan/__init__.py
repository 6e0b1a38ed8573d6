"""Plans: the choice of method, draft and split for given boards."""
