"""Passes: pure functions Graph -> Graph, one file a pass, file name = pass name = name on the command
line."""
