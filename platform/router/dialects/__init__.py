"""Other APIs than OpenAI's completions: Anthropic's Messages and OpenAI's Responses.

Each request becomes a chat request and goes the way of chats (`completions.endpoint`); the pieces of the answer become
the API's own JSON or events. May import completions and what is below; never api.
"""
