"""Fine-tuning of small models for a target, one after another, each on the mistakes of the previous ones."""
