"""The recipe of the bundled models: texts, tokenizer, training."""
