"""What a curious model owner learns of prompts: a registry of attacks, and their runs by target."""
