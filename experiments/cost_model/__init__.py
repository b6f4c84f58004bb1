"""Cost model: what a completion would cost, from plans and prices."""
