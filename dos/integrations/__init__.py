"""Other libraries' training loops, and what works this optimizer into them."""
