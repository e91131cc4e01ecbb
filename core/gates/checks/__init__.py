"""The gates themselves. `order.py`, next to this folder, lists them."""
