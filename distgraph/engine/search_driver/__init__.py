"""The search behind `Strategy(mode="auto")` and `distgraph plan`; it starts at `run_search.run_search`.

It enumerates candidates, has `distgraph.passes.search` solve their optimisation problems, compiles and
forecasts the candidates, and keeps the best as a plan.
"""
