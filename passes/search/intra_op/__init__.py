"""The intra-operator problem of a mesh: strategies of ops, their costs, and layouts from a solution."""
