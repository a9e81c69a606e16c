"""`python -m distgraph` is the command line."""

from distgraph.cli.entry import main

if __name__ == "__main__":
    main()
