"""The HTTP gateway under load, and when something around it fails."""
