"""A page that shows what a run did: its command, the story that spans tell, and the form of the page."""
