"""Reductions that wait: partial sums passed on through linear ops, and sums over values of several meshes."""
