"""What a completion would cost, from plans and prices."""
