"""Measure a pipeline under load from several requests: latencies and tokens/s."""
