"""Measuring a machine: probes of ops and collectives, and a resource file fitted to them."""
