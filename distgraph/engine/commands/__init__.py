"""What the command line does with a user's script: forecast, search a plan, check."""
