"""An HTTP server at the client: programs that speak OpenAI's or Anthropic's protocol ask it, and it
asks the provider by two-party computation. What they send stays on this machine in the clear.
"""
