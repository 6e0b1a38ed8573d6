"""What the bundled models learned: dialogues of six kinds, and Python source."""
