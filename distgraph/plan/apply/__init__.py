"""Plans applied to models of other frameworks, which then run as planned. See docs/planning/apply.md.

Only this package runs code of another framework for a plan; it imports it when it is called.
"""
