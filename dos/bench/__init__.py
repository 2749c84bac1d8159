"""Measurements that a user makes on a machine of their own: `dos bench`."""
