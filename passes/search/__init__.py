"""The optimisation problems of the search, posed on graphs: layers, layouts (intra-op), stages (inter-op).

`distgraph.engine.search_driver` poses these problems, builds programs from their solutions and forecasts
them.
"""
