"""The paper on DSI: formulas, events, measured rates and times, and its figures."""
