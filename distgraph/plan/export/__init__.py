"""Export of plans to the terms of other frameworks. See docs/planning/export.md."""
