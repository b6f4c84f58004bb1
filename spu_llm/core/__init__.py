"""What everything is written in: values, messages, randomness, protocol ops, what was opened."""
