"""How an answer is found in a reply and compared with a reference; polyturn/reward.py holds the public names."""
