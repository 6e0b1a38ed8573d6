"""Evaluations of a trace: sums of spans, a breakdown of the time of a token, and a page of the timeline."""
