"""A rank at work: its device, its compiled tasks, and what is checked while they run."""
