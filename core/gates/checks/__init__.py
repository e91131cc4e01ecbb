"""The gates themselves. `order.py`, beside this folder, lists them."""
