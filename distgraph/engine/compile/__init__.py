"""From a model to a compiled program: trace, complete, place ranks, build; plans applied and extracted."""
