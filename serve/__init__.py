"""The server: OpenAI's protocol over HTTP for several users at a time, on a pipeline that stays loaded."""
