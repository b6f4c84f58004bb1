"""The page to chat with, as files that the gateway serves."""
