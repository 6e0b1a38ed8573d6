"""Training of drafts: draft heads for a model, and small models that draft for it."""
