"""The search behind `Strategy(mode="auto")` and `distgraph plan`: see `driver.run_search`."""
