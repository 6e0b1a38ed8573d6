"""The training of drafts: heads for a model, and small models that draft for it."""
