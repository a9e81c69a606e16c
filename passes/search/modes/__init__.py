"""Searches that follow other published methods: sharding propagation and double recursion."""
