"""Task graphs, actors and the order in which every rank runs its tasks."""
