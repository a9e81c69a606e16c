"""The solver of the intra-operator problem: `solve` is its one entry."""
