"""The training texts of the bundled models: dialogues of six kinds, and Python source."""
