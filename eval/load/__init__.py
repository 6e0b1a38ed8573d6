"""Several requests at once, to a pipeline or a server: what each waits, and tokens/s."""
