"""Six kinds of dialogue, one file each, and the tables they draw from."""
