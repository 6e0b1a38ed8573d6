"""Measure a pipeline or a server under load from several requests: latencies and tokens/s."""
