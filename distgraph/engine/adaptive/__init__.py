"""Adapting a running job: measured speeds of its devices, and better plans for them."""
