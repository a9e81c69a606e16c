"""Runtime models: what is special about who executes a program, as data with the source of every number."""
