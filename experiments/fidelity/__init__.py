"""Studies of fidelity: what shares and ranges change of a model's logits, tokens and answers."""
