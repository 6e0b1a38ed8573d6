"""Which method, split and draft suit given devices: plans, and how well they hold."""
