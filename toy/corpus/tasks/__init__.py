"""Six kinds of dialogue, one file each, and the tables for their words."""
