"""What a trace shows: sums of spans, where the time of a token went, a page of the timeline."""
