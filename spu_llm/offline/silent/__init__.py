"""Silent products: masks times the provider's weights, without a message per mask."""
