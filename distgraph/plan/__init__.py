"""Plans: everything that is decided about a distributed program, as data apart from the program."""
