"""Fine-tunes small models one after another for a target, each on what those before it get wrong."""
