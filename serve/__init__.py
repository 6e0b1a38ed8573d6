"""A pipeline that stays: OpenAI's protocol over HTTP, several users at a time."""
